"""The report's sections on budget, cost and what became of the computed pairs."""

from collections import defaultdict

import numpy as np

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.clock import slice_of
from jobs.common.report_data import ReportData, Rows
from jobs.common.report_page import Section, ratio, table

Curve = list[tuple[float, float]]


def budget(data: ReportData) -> Section:
    section = Section(
        "budget",
        "Coverage against budget",
        "Candidates are taken from the most probable down. The solid curve says how many scored rows the verifier "
        "expects to cover with that share of the candidates; the diamond is what the slice covered in fact. Hindsight, "
        "dotted, is the most that so many pairs could have covered, had one known the window: any pairs, candidates or "
        "not. The gap below it is what a better verifier, or more sources, could still win. A solid curve that is "
        "steep at the budget means more budget buys coverage.",
        job="predict_pairs",
        hint="; the realised point and hindsight come from audit_coverage",
    )
    by_slice: dict[str, Rows] = defaultdict(list)
    for row in data.forecast:
        by_slice[row["slice"]].append(row)
    realised = {slice_of(row["predicted_at"]): row for row in data.ledger}
    best = {slice_of(row["predicted_at"]): data.window_pairs for row in data.ledger[-1:]}
    series, points, summary = [], [], []
    for place, (name, rows) in enumerate(by_slice.items()):
        candidates = sum(row["pairs"] for row in rows)
        if not candidates:
            continue
        chosen = [row for row in rows if row["action"] != "skip"]
        selected = sum(row["pairs"] for row in chosen)
        color = charts.SERIES[place]
        expected, possible = _cumulative(rows), hindsight(best.get(name, []), candidates)
        for kind, style, title, unit, curve in (
            ("expected", "solid", "Expected rows by share of candidates", "expected rows", expected),
            ("hindsight", "dotted", "Hindsight: most rows that so many pairs could cover", "rows", possible),
        ):
            if curve:
                series.append((f"{kind}, slice {name}", color, style, *_from_zero(curve)))
                columns = ("pairs", "share of candidates", unit)
                rows_shown = _points(curve, candidates)
                section.tables.append(table(f"{title}, slice {name}", columns, rows_shown, words=0))
        fact = realised.get(name)
        share = selected / candidates
        if fact:
            points.append((f"realised, slice {name}", "vermillion", share, float(fact["covered_rows"])))
        most = rows_at(possible, share) if possible else None
        summary.append(
            (
                name,
                fmt.count(candidates),
                fmt.count(selected),
                fmt.share(share),
                fmt.number(sum(row["expected_rows"] for row in chosen)),
                fmt.count(fact["covered_rows"] if fact else None),
                fmt.count(most),
                fmt.share(ratio(fact["covered_rows"] if fact else None, most)),
                fmt.count(fact["scored_rows"] if fact else None),
                fmt.flops(sum(row["cost"] for row in rows if row["action"] == "compute")),
            )
        )
    if series:
        section.charts.append(
            charts.lines(
                "Scored rows covered by budget",
                "Expected covered rows rise with the share of candidates that is computed; above them the most that "
                "hindsight could have covered.",
                series,
                x="share of candidates computed or reused",
                y="scored rows",
                dated=False,
                percent_x=True,
                points=points,
            )
        )
        head = ["slice", "candidates", "selected", "share", "expected rows", "covered rows", "hindsight"]
        head += ["of hindsight", "scored rows", "cost"]
        section.tables.insert(0, table("Forecast, fact and hindsight", head, summary, open=True))
    return section


def _cumulative(rows: Rows) -> Curve:
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


def hindsight(window: Rows, candidates: int) -> Curve:
    """(share of candidates, rows): the most scored rows of a window that as many pairs could have covered.

    window: how many pairs were scored so many rows each (rows, pairs), the most rows first. The curve ends at 1, or
    earlier where all rows are covered by then.
    """
    curve: Curve = []
    pairs = covered = 0
    for row in window:
        taken = min(row["pairs"], candidates - pairs)
        pairs, covered = pairs + taken, covered + taken * row["rows"]
        if taken:
            curve.append((pairs / candidates, float(covered)))
    return curve


def rows_at(curve: Curve, share: float) -> float:
    """The rows of a curve at a share, linear between its points from (0, 0) on, the last one's beyond them."""
    return float(np.interp(share, *_from_zero(curve)))


def _points(curve: Curve, candidates: int) -> list[tuple[str, ...]]:
    return [(fmt.count(x * candidates), fmt.share(x), fmt.number(y)) for x, y in curve]


def _from_zero(curve: Curve) -> tuple[list[float], list[float]]:
    return [0.0, *(x for x, _ in curve)], [0.0, *(y for _, y in curve)]


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
