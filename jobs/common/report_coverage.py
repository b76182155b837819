"""The report's sections on coverage and freshness."""

from collections import defaultdict
from typing import Any

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.report_data import TIER_NAMES, ReportData
from jobs.common.report_page import Section, ratio, table

TIER_COLORS = {
    "pair": "blue",
    "user_mean": "green",
    "neighbor_pair": "orange",
    "neighbor_mean": "sky",
    "cold": "purple",
}


def windows_of(data: ReportData, population: str) -> list[tuple[Any, dict[str, dict[str, Any]]]]:
    """(window_start, rows by tier) of one population, in the order of time."""
    found: dict[Any, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in data.coverage:
        if row["population"] == population:
            found[row["window_start"]][row["tier"]] = row
    return sorted(found.items())


def tier_share(tiers: dict[str, dict[str, Any]], *names: str) -> float:
    """Share of a window's rows that the named tiers answered."""
    total = sum(int(row["rows"]) for row in tiers.values())
    return sum(int(tiers[name]["rows"]) for name in names if name in tiers) / max(1, total)


SERVED = TIER_NAMES[:-1]


def coverage(data: ReportData) -> Section:
    section = Section(
        "coverage",
        "Coverage by tier",
        "Each bar is one window of the log, replayed against the snapshot that was live at each row's "
        "time. The bar's height is the share of rows that got an embedding, its colours say where the "
        "embedding came from, the gap up to 100% got none.",
        job="audit_coverage",
    )
    for population in ("scored", "shown"):
        windows = windows_of(data, population)
        if not windows:
            continue
        present = [tier for tier in SERVED if any(tier in tiers for _, tiers in windows)]
        latest = windows[-1][1]
        section.charts.append(
            charts.stacked_bars(
                f"{population.capitalize()} rows",
                f"Coverage of {population} rows by tier over {len(windows)} windows; the latest is "
                f"{fmt.share(tier_share(latest, *SERVED))} covered.",
                [start for start, _ in windows],
                [(tier, TIER_COLORS[tier], [tier_share(tiers, tier) for _, tiers in windows]) for tier in present],
                percent=True,
            )
        )
        section.tables.append(
            table(
                f"Coverage of {population} rows",
                ("window from (UTC)", "rows", "covered", *present, "none"),
                [
                    (
                        fmt.when(start),
                        fmt.count(sum(row["rows"] for row in tiers.values())),
                        fmt.share(tier_share(tiers, *SERVED)),
                        *(fmt.share(tier_share(tiers, tier)) for tier in (*present, "none")),
                    )
                    for start, tiers in windows[::-1]
                ],
            )
        )
    if data.breakdown:
        section.tables.append(
            table(
                "Latest window by surface and segment",
                ("population", "surface", "segment", "rows", "covered rows", "covered"),
                [
                    (
                        row["population"],
                        row["surface"],
                        row["segment"],
                        fmt.count(row["rows"]),
                        fmt.count(row["covered"]),
                        fmt.share(ratio(row["covered"], row["rows"])),
                    )
                    for row in data.breakdown
                ],
                words=3,
            )
        )
    return section


def freshness(data: ReportData) -> Section:
    section = Section(
        "freshness",
        "Freshness",
        "Age of the served embedding at the time of the request, scored rows. Solid is the mean, dotted "
        "the 90th percentile. An age near the TTL means that the pipeline is late or its reuse is too "
        "long.",
        job="audit_coverage",
    )
    windows = windows_of(data, "scored")
    series, shown = [], []
    for tier in SERVED:
        for column, label, style in (("mean_age", tier, "solid"), ("p90_age", f"{tier}, p90", "dotted")):
            known = [
                (start, tiers[tier][column] / 3600)
                for start, tiers in windows
                if tier in tiers and tiers[tier][column] is not None
            ]
            if known:
                series.append((label, TIER_COLORS[tier], style, [at for at, _ in known], [age for _, age in known]))
                if tier not in shown:
                    shown.append(tier)
    if series:
        section.charts.append(
            charts.lines(
                "Age of served embeddings",
                "Mean and 90th percentile of the age by tier, in hours.",
                series,
                y="hours",
            )
        )
        section.tables.append(
            table(
                "Mean and p90 age by tier",
                ("window from (UTC)", *(f"{tier} {kind}" for tier in shown for kind in ("mean", "p90"))),
                [
                    (
                        fmt.when(start),
                        *(
                            fmt.hours(tiers.get(tier, {}).get(column))
                            for tier in shown
                            for column in ("mean_age", "p90_age")
                        ),
                    )
                    for start, tiers in windows[::-1]
                ],
            )
        )
    return section
