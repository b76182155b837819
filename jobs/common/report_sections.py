"""The report's sections in their order, and the tiles above them."""

from collections.abc import Callable
from dataclasses import replace

from jobs.common import report_format as fmt
from jobs.common.report_budget import budget, cost, ledger
from jobs.common.report_coverage import SERVED, coverage, freshness, tier_share, windows_of
from jobs.common.report_data import ReportData
from jobs.common.report_operations import jobs, neighbors, rejected, snapshots
from jobs.common.report_page import Section, Tile, ratio
from jobs.common.report_uplift import ab_test, coverage_gain, other_sweeps, uplift


def tiles(data: ReportData) -> list[Tile]:
    """The figures that one looks at first; those without data are left out."""
    found: list[Tile] = []
    for population in ("scored", "shown"):
        windows = windows_of(data, population)
        if windows:
            start, tiers = windows[-1]
            found.append(
                Tile(
                    f"Coverage, {population} rows",
                    fmt.share(tier_share(tiers, *SERVED)),
                    f"{fmt.share(tier_share(tiers, 'pair'))} by pair, window from {fmt.when(start)}",
                )
            )
    if data.ledger:
        last = data.ledger[-1]
        found.append(
            Tile(
                "Precision of precompute",
                fmt.share(ratio(last["hit"], last["computed"])),
                f"{fmt.count(last['hit'])} of {fmt.count(last['computed'])} computed pairs were scored",
            )
        )
        if last["covered_rows"]:
            found.append(
                Tile(
                    "Cost per 1,000 covered rows",
                    fmt.flops(last["cost"] / last["covered_rows"] * 1000),
                    f"slice predicted at {fmt.when(last['predicted_at'])}",
                )
            )
    if data.snapshots:
        last = max(data.snapshots, key=lambda row: (row["live_from"], row["slice"]))
        users = sum(last[kind] for kind in ("users_own", "users_neighbor", "users_cold"))
        found.append(
            Tile(
                "Latest snapshot",
                f"{fmt.count(last['pairs'])} pairs",
                f"{fmt.count(users)} users, {fmt.size(last['bytes'])}",
            )
        )
    for row in data.evaluations:
        wanted = ("main", "embeddings", "transfer_ratio")
        if (row["sweep"], row["feature_set"], row["metric"]) == wanted and row["value"] is not None:
            value, low, high = row["value"], row["ci_low"], row["ci_high"]
            bounds = "" if low is None or high is None else f", 95% interval {fmt.interval_alone(low, high)}"
            shown = fmt.interval(value, low, high).split(" ")[0]
            found.append(Tile("Transfer ratio, embeddings", shown, f"on {row['dataset']}{bounds}"))
    return found


def sections(data: ReportData) -> list[Section]:
    """All sections in the order of the page; one without data and without a job that fills it is left out."""
    makers: tuple[Callable[[ReportData], Section], ...] = (
        coverage,
        budget,
        cost,
        ledger,
        uplift,
        coverage_gain,
        ab_test,
        other_sweeps,
        freshness,
        neighbors,
        snapshots,
        jobs,
        rejected,
    )
    said: set[str] = set()
    made = [_without(make(data), said) for make in makers]
    return [section for section in made if not section.empty or section.job or section.hint]


def _without(section: Section, said: set[str]) -> Section:
    """The section without the notes that were said before; adds its own to them."""
    fresh = [note for note in dict.fromkeys(section.notes) if note not in said]
    said.update(fresh)
    return replace(section, notes=fresh)
