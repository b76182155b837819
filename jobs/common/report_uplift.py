"""The report's sections on what the embeddings are worth: uplift, coverage gain, A/B tests and the other sweeps."""

from collections.abc import Sequence
from typing import Any

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.report_data import TIER_NAMES, ReportData, Rows
from jobs.common.report_page import Section, table

METRICS = ("log_loss", "ne", "rll", "rll_added", "auc", "calibration", "transfer_ratio", "transfer_ratio_fresh")
TITLES = {
    "log_loss": "log loss",
    "ne": "NE",
    "rll": "RLL",
    "rll_added": "RLL added",
    "auc": "AUC",
    "calibration": "calibration",
    "transfer_ratio": "transfer ratio",
    "transfer_ratio_fresh": "transfer ratio to fresh",
}


def _of_sweep(data: ReportData, sweep: str) -> dict[str, Rows]:
    """Rows of a sweep by dataset."""
    found: dict[str, Rows] = {}
    for row in data.evaluations:
        if row["sweep"] == sweep:
            found.setdefault(row["dataset"], []).append(row)
    return found


def _metrics(rows: Rows) -> list[str]:
    """The metrics that occur, the well-known ones first."""
    present = {row["metric"] for row in rows}
    return [name for name in METRICS if name in present] + sorted(present - set(METRICS))


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}: {row['feature_set']}" if row["feature_set"] else row["model"]


def _figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return fmt.MISSING
    return fmt.interval(row["value"], row["ci_low"], row["ci_high"], _unit(row["metric"]))


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    known = ("base", "distillation", "embeddings", "both")
    place = known.index(row["feature_set"]) if row["feature_set"] in known else len(known)
    return (row["model"] != "vm", place, row["model"], row["feature_set"])


def _figures(caption: str, rows: Rows, *, setting: str | None = None) -> Any:
    """One line a (setting, model, feature set), one column a metric."""
    metrics = _metrics(rows)
    by_key: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (_setting_order(row["setting"]), _order(row))):
        by_key.setdefault((row["setting"], _name(row)), {})[row["metric"]] = row
    head = ("model: feature set", *(_title(name) for name in metrics), "rows")
    lines = [
        ((key[0],) if setting else ())
        + (key[1],)
        + tuple(_figure(found.get(name)) for name in metrics)
        + (fmt.count(max(row["rows"] for row in found.values())),)
        for key, found in by_key.items()
    ]
    return table(caption, ((setting,) if setting else ()) + head, lines, words=2 if setting else 1, open=True)


def _setting_order(setting: str) -> tuple[bool, float, str]:
    number = _as_number(setting)
    return (number is None, number or 0.0, setting)


def _as_number(setting: str) -> float | None:
    try:
        return float(setting.removesuffix("%")) / (100 if setting.endswith("%") else 1)
    except ValueError:
        return None


def _notes(rows: Rows) -> list[str]:
    """One line a note: with the models that it is about, unless it is about all that have the metric."""
    having: dict[tuple[str, str], set[str]] = {}
    noted: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in sorted(rows, key=_order):
        about = (row["dataset"], row["metric"])
        having.setdefault(about, set()).add(_name(row))
        if row["note"]:
            noted.setdefault((*about, row["note"]), {})[_name(row)] = None
    lines = []
    for (dataset, metric, note), names in noted.items():
        whom = "" if set(names) == having[dataset, metric] else " of " + ", ".join(names)
        lines.append(f"{dataset}, {_title(metric)}{whom}: {note}")
    return sorted(lines)


def _title(metric: str) -> str:
    return TITLES.get(metric, metric.replace("_", " "))


def _unit(metric: str) -> str:
    """RLL and the lifts of an A/B test are stored in percent."""
    return "%" if metric.startswith("rll") or metric.endswith("_lift") else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _interval_chart(dataset: str, rows: Rows, metric: str, x: str, color: str = "blue") -> list[charts.Chart]:
    found = [
        (_name(row), row["value"], row["ci_low"], row["ci_high"])
        for row in sorted(rows, key=_order)
        # The truth is so far off that the rest would shrink to one point; its figure stands in the table.
        if row["metric"] == metric and row["value"] is not None and row["model"] != "truth"
    ]
    title = _capital(f"{_title(metric)} on {dataset}")
    return (
        [charts.intervals(title, f"{title} by feature set with 95% intervals.", found, x=x, color=color)]
        if found
        else []
    )


def uplift(data: ReportData) -> Section:
    """The main comparison: what each feature set gains over the small model alone."""
    section = Section(
        "uplift",
        "Uplift",
        "The small online model with each feature set, on identical rows. Relative log loss (RLL) below "
        "zero is better than the model alone; the transfer ratio says how much of the foundation model's "
        "advantage carries over. Brackets and bars are 95% intervals; one that contains 0 shows no "
        "effect. every_pair is what an unlimited budget would give.",
        job="evaluate_uplift",
    )
    for dataset, rows in _of_sweep(data, "main").items():
        section.charts.extend(_interval_chart(dataset, rows, "rll", "relative log loss, %; left is better"))
        section.charts.extend(
            _interval_chart(dataset, rows, "transfer_ratio", "transfer ratio; right is better", "green")
        )
        seeds = max(row["seeds"] for row in rows)
        section.tables.append(
            _figures(
                f"Figures on {dataset}, evaluation {rows[0]['evaluation_id']}" + (f", {seeds} seeds" if seeds else ""),
                rows,
            )
        )
        section.notes.extend(_notes(rows))
    return section


def coverage_gain(data: ReportData) -> Section:
    """Gain by share of rows that carry an embedding."""
    section = Section(
        "coverage-gain",
        "Gain by coverage",
        "How the small model's loss changes with the share of rows that carry an embedding. A line that "
        "keeps falling says that more coverage is worth its cost.",
        job="evaluate_uplift",
    )
    for dataset, rows in _of_sweep(data, "coverage").items():
        metric = next((name for name in ("rll", "ne", "log_loss") if any(row["metric"] == name for row in rows)), None)
        series, band = [], {}
        drawn = [
            row
            for row in rows
            if row["metric"] == metric and row["value"] is not None and _as_number(row["setting"]) is not None
        ]
        for place, name in enumerate(sorted({_name(row) for row in drawn})[: len(charts.SERIES)]):
            line = sorted((row for row in drawn if _name(row) == name), key=lambda row: _setting_order(row["setting"]))
            shares = [_as_number(row["setting"]) or 0.0 for row in line]
            series.append((name, charts.SERIES[place], "solid", shares, [row["value"] for row in line]))
            if all(row["ci_low"] is not None and row["ci_high"] is not None for row in line):
                band[name] = ([row["ci_low"] for row in line], [row["ci_high"] for row in line])
        if series:
            label = _title(str(metric))
            percent = all(0 <= place <= 1 for _, _, _, places, _ in series for place in places)
            section.charts.append(
                charts.lines(
                    _capital(f"{label} by coverage on {dataset}"),
                    f"{label} against the share of rows with an embedding.",
                    series,
                    x="share of rows with an embedding",
                    y=label + (", %" if metric == "rll" else ""),
                    dated=False,
                    percent_x=percent,
                    from_zero=False,
                    band=band,
                )
            )
        section.tables.append(_figures(f"Coverage sweep on {dataset}", rows, setting="coverage"))
        section.notes.extend(_notes(rows))
    return section


def ab_test(data: ReportData) -> Section:
    """The simulated closed loop, arm by arm."""
    section = Section(
        "ab",
        "Simulated A/B test",
        "The closed loop: each arm ranks its own copy of the world, with and without the live snapshot; "
        "the A/A pair shows how large a difference arises by chance.",
        job="simulate_ab",
    )
    for dataset, rows in _of_sweep(data, "ab").items():
        for metric in [name for name in _metrics(rows) if name.endswith("_lift")]:
            section.charts.extend(_interval_chart(dataset, rows, metric, f"{_title(metric)} over the control, %"))
        section.tables.append(
            _figures(f"Arms on {dataset}", rows, setting="setting" if any(row["setting"] for row in rows) else None)
        )
        section.notes.extend(_notes(rows))
    return section


# A sweep's caption, and the head of the column of its settings.
SWEEPS = {
    "budget": ("Share of the budget", "share"),
    "codec": ("Codec", "codec"),
    "fm_age": ("Age of the foundation model", "hours"),
    "tier": ("Tiers, each with those before it", "tiers"),
    "tier_rows": ("Each tier on the rows that it answered", "tier"),
    "ttl": ("Time to live", "hours"),
}


def _own_rows(dataset: str, rows: Rows) -> list[charts.Chart]:
    """What each tier adds on its own rows: one dot a tier."""
    found = [
        (row["setting"], row["value"], row["ci_low"], row["ci_high"])
        for row in sorted(rows, key=lambda row: TIER_NAMES.index(row["setting"]))
        if row["metric"] == "rll_added" and row["value"] is not None
    ]
    title = f"What each tier adds on its own rows, {dataset}"
    alt = "Relative log loss with each tier against the model without it, on the rows that it answered."
    return [charts.intervals(title, alt, found, x="RLL added, %; left is better")] if found else []


def other_sweeps(data: ReportData) -> Section:
    """Tiers, budget, TTL, codec and age of the model."""
    section = Section(
        "sweeps",
        "Further sweeps",
        "The same evaluation with one setting varied: time to live, codec, budget, or which tiers may answer. RLL "
        "added is the loss against the model without the setting's last tier, over all rows or over those that the "
        "tier answered; an interval below zero says that the tier is worth something of its own. The age of the "
        "foundation model has one row an evaluation, each on rows of its own time.",
    )
    names: Sequence[str] = sorted({row["sweep"] for row in data.evaluations} - {"main", "coverage", "ab"})
    for sweep in names:
        for dataset, rows in _of_sweep(data, sweep).items():
            if sweep == "tier_rows":
                section.charts.extend(_own_rows(dataset, rows))
            caption, setting = SWEEPS.get(sweep, (_capital(sweep), "setting"))
            section.tables.append(_figures(f"{caption}, {dataset}", rows, setting=setting))
            section.notes.extend(_notes(rows))
    return section
