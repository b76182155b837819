"""The report's sections on budget, cost and what became of the computed pairs."""

from collections import defaultdict

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.clock import slice_of
from jobs.common.report_data import ReportData, Rows
from jobs.common.report_page import Section, ratio, table


def budget(data: ReportData) -> Section:
    section = Section(
        "budget",
        "Coverage against budget",
        "Candidates are taken from the most probable down. The curve says how many scored rows the "
        "verifier expects to cover with that share of the candidates; the diamond is what the slice "
        "covered in fact. A curve that is still steep at the budget means more budget buys coverage.",
        job="predict_pairs",
        hint="; the realised point comes from audit_coverage",
    )
    by_slice: dict[str, Rows] = defaultdict(list)
    for row in data.forecast:
        by_slice[row["slice"]].append(row)
    realised = {slice_of(row["predicted_at"]): row for row in data.ledger}
    series, points, summary = [], [], []
    for place, (name, rows) in enumerate(by_slice.items()):
        candidates = sum(row["pairs"] for row in rows)
        if not candidates:
            continue
        chosen = [row for row in rows if row["action"] != "skip"]
        forecast = sum(row["expected_rows"] for row in chosen)
        curve = _cumulative(rows)
        series.append(
            (
                f"expected, slice {name}",
                charts.SERIES[place],
                "solid",
                [0.0, *(x for x, _ in curve)],
                [0.0, *(y for _, y in curve)],
            )
        )
        fact = realised.get(name)
        share = sum(row["pairs"] for row in chosen) / candidates
        if fact:
            points.append((f"realised, slice {name}", "vermillion", share, float(fact["covered_rows"])))
        summary.append(
            (
                name,
                fmt.count(candidates),
                fmt.count(sum(row["pairs"] for row in chosen)),
                fmt.share(share),
                fmt.number(forecast),
                fmt.count(fact["covered_rows"]) if fact else fmt.MISSING,
                fmt.count(fact["scored_rows"]) if fact else fmt.MISSING,
                fmt.flops(sum(row["cost"] for row in rows if row["action"] == "compute")),
            )
        )
        section.tables.append(
            table(
                f"Expected rows by share of candidates, slice {name}",
                ("share of candidates", "expected rows"),
                [(fmt.share(x), fmt.number(y)) for x, y in _thinned(curve)],
                words=0,
            )
        )
    if series:
        section.charts.append(
            charts.lines(
                "Expected scored rows by budget",
                "Expected covered rows rise with the share of candidates that is computed.",
                series,
                x="share of candidates computed or reused",
                y="scored rows",
                dated=False,
                percent_x=True,
                points=points,
            )
        )
        section.tables.insert(
            0,
            table(
                "Forecast and fact",
                ("slice", "candidates", "selected", "share", "expected rows", "covered rows", "scored rows", "cost"),
                summary,
                open=True,
            ),
        )
    return section


def _cumulative(rows: Rows) -> list[tuple[float, float]]:
    """(share of candidates, expected rows) from the highest bucket down."""
    total = sum(row["pairs"] for row in rows)
    buckets: dict[float, list[float]] = defaultdict(lambda: [0, 0.0])
    for row in rows:
        buckets[row["bucket"]][0] += row["pairs"]
        buckets[row["bucket"]][1] += row["expected_rows"]
    curve, pairs, expected = [], 0.0, 0.0
    for bucket in sorted(buckets, reverse=True):
        pairs, expected = pairs + buckets[bucket][0], expected + buckets[bucket][1]
        curve.append((pairs / total, expected))
    return curve


def _thinned(curve: list[tuple[float, float]], most: int = 25) -> list[tuple[float, float]]:
    step = max(1, -(-len(curve) // most))
    return [point for place, point in enumerate(curve) if place % step == step - 1 or place == len(curve) - 1]


def cost(data: ReportData) -> Section:
    section = Section(
        "cost",
        "Cost of coverage",
        "Foundation-model work spent for each 1,000 scored rows that pair embeddings covered. Falling is "
        "better: the verifier picks pairs that are scored more often, or more are reused.",
        job="audit_coverage",
    )
    rows = [(row, row["cost"] / row["covered_rows"] * 1000 if row["covered_rows"] else None) for row in data.ledger]
    if any(per is not None for _, per in rows):
        drawn = [(row["predicted_at"], per) for row, per in rows if per is not None]
        section.charts.append(
            charts.lines(
                "FLOP per 1,000 covered rows",
                f"Cost per 1,000 covered rows over {len(drawn)} slices; the latest is {fmt.flops(drawn[-1][1])}.",
                [
                    (
                        "FLOP per 1,000 covered rows",
                        "blue",
                        "solid",
                        [at for at, _ in drawn],
                        [per for _, per in drawn],
                    )
                ],
                y="FLOP",
            )
        )
    if rows:
        section.tables.append(
            table(
                "Cost by slice",
                ("predicted at (UTC)", "cost", "embedding time", "covered rows", "cost per 1,000", "time per 1,000"),
                [
                    (
                        fmt.when(row["predicted_at"]),
                        fmt.flops(row["cost"]),
                        fmt.seconds(row["seconds"]),
                        fmt.count(row["covered_rows"]),
                        fmt.flops(per),
                        fmt.seconds(
                            row["seconds"] * 1000 / row["covered_rows"]
                            if row["seconds"] is not None and row["covered_rows"]
                            else None
                        ),
                    )
                    for row, per in rows[::-1]
                ],
            )
        )
    return section


def ledger(data: ReportData) -> Section:
    section = Section(
        "ledger",
        "Precompute ledger",
        "What became of the pairs of each slice: a hit was scored in its window, a wasted one was not, a "
        "reused one was still fresh and cost nothing, a rejected one had no usable embedding. Precision "
        "is hit / (hit + wasted).",
        job="audit_coverage",
    )
    if data.ledger:
        kinds = (("hit", "blue"), ("wasted", "orange"), ("reused", "green"), ("rejected", "vermillion"))
        section.charts.append(
            charts.stacked_bars(
                "Pairs by outcome",
                f"Pairs hit, wasted, reused and rejected over {len(data.ledger)} slices.",
                [row["predicted_at"] for row in data.ledger],
                [(name, color, [row[name] for row in data.ledger]) for name, color in kinds],
                unit="pairs",
            )
        )
        section.tables.append(
            table(
                "Ledger by slice",
                (
                    "predicted at (UTC)",
                    "predicted",
                    "computed",
                    "hit",
                    "wasted",
                    "precision",
                    "reused",
                    "rejected",
                    "expected rows",
                    "covered rows",
                    "scored rows",
                ),
                [
                    (
                        fmt.when(row["predicted_at"]),
                        *(fmt.count(row[name]) for name in ("predicted", "computed", "hit", "wasted")),
                        fmt.share(ratio(row["hit"], row["computed"])),
                        fmt.count(row["reused"]),
                        fmt.count(row["rejected"]),
                        fmt.number(row["expected_rows"]),
                        fmt.count(row["covered_rows"]),
                        fmt.count(row["scored_rows"]),
                    )
                    for row in data.ledger[::-1]
                ],
            )
        )
    return section
