"""What bench/uplift.py and bench/transfer.py print of an evaluation, and the targets that they judge it by."""

from collections.abc import Iterator
from itertools import pairwise

from measure import Figure, at_least, at_most
from rich.table import Table

from jobs.common.terminal import console
from solaris_udf.uplift import Figure as Measured

# Figures over all seeds by sweep, setting, model, feature set, metric.
Found = dict[tuple[str, str, str, str, str], Measured]


def shown(row: Measured | None, digits: int = 4) -> str:
    if row is None or row.value is None:
        return "-"
    interval = f" [{row.ci_low:.{digits}f}, {row.ci_high:.{digits}f}]" if row.ci_low is not None else ""
    return f"{row.value:.{digits}f}{interval}"


def show(world: str, found: Found) -> None:
    """One line a model or setting."""
    metrics = {"ne": 4, "rll": 2, "auc": 4, "calibration": 3, "transfer_ratio": 3, "transfer_ratio_fresh": 3}
    for sweep in sorted({key[0] for key in found}, key=lambda name: (name != "main", name)):
        names = [name for name in metrics if sweep == "main" or "transfer" not in name]
        if sweep.startswith(("tier", "user_mean")):
            names.append("rll_added")
        table = Table("setting", *names, title=f"{world} world, {sweep}", title_justify="left")
        for setting, model in dict.fromkeys((key[1], key[2:4]) for key in found if key[0] == sweep):
            cells = (shown(found.get((sweep, setting, *model, name)), metrics.get(name, 2)) for name in names)
            table.add_row(setting or " ".join(model), *cells)
        console.print(table)
    for note in sorted({row.note for row in found.values() if row.note}):
        console.print(f"note: {note}", highlight=False)


def judged(world: str, found: Found) -> Iterator[Figure]:
    """What the design asks for."""

    def of(metric: str, feature_set: str, sweep: str = "main", setting: str = "") -> Measured | None:
        return found.get((sweep, setting, "vm", feature_set, metric))

    # To the foundation model at the slice's start, and to the one with fresh histories; null where it has no advantage.
    for metric, teacher in (("transfer_ratio", "slice start"), ("transfer_ratio_fresh", "fresh")):
        ratio, soft = of(metric, "embeddings"), of(metric, "distillation")
        if ratio and ratio.value is None:  # the model is not surely better than the base: its note says so
            yield Figure(f"{world}: transfer ratio of embeddings, {teacher} model", None, "not stated", 0.42, False)
        if ratio and soft and ratio.value is not None and soft.value is not None:
            yield at_least(f"{world}: transfer ratio of embeddings, {teacher} model", ratio.value, "", 0.42)
            yield at_least(f"{world}: less twice that of soft labels", ratio.value - 2 * soft.value, "", 0.0)
    shares = sorted(
        (float(setting), row.value)
        for (sweep, setting, _, _, metric), row in found.items()
        if (sweep, metric) == ("coverage", "log_loss")
    )
    rises = sum(after >= before for (_, before), (_, after) in pairwise(shares))
    yield at_most(f"{world}: steps of coverage at which log loss rises", rises, f"of {len(shares) - 1}", 0)
    shuffled = of("rll", "shuffled")
    if shuffled:
        yield at_most(f"{world}: gain of the shuffled control, lower end", -shuffled.ci_high, "% of log loss", 0.0)
        yield at_most(f"{world}: harm of the shuffled control, lower end", shuffled.ci_low, "% of log loss", 0.0)
    added = of("rll_added", "embeddings", "tier", "pair + user_mean")
    if added:
        yield at_most(f"{world}: what the user mean adds to the pairs, upper end", added.ci_high, "% of log loss", 0.0)
    for (sweep, tier, _, _, metric), row in found.items():
        if (sweep, metric) == ("tier_rows", "rll_added") and tier != "pair" and row.ci_high is not None:
            name = f"{world}: what {tier} is worth on its own rows, upper end"
            yield at_most(name, row.ci_high, "% of log loss", 0.0)
