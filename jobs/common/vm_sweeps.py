"""The sweeps of evaluate_uplift: the same small model on rows that were served less, or differently.

coverage: a random share of the rows keeps its vectors. budget: pairs that a smaller budget would not have bought count
as not served; user-level vectors stay, which fewer pairs would also change a little. tier: the hierarchy's tiers one
after the other, each with those before it; rll_added is what it adds to them. tier_rows: the same models, each tier on
the rows that it answered alone, where rll_added says what its vectors are worth. ttl: pairs that are older count as not
served. codec: vectors as they come back from int8. A setting that is what was served anyway is measured again, so that
a sweep can be read by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from jobs.common.evaluations import Stated
from jobs.common.vm_rows import Collected

if TYPE_CHECKING:
    from solaris_udf.uplift import Figure
    from solaris_udf.vertical_rows import Rows

KEY = ("vm", "embeddings")


class Sweeps(Protocol):
    """Which sweeps are wanted: the settings of evaluate_uplift."""

    coverage_sweep: tuple[float, ...]
    budget_sweep: tuple[float, ...]
    tier_sweep: bool
    ttl_sweep: tuple[float, ...]
    codec_sweep: bool


@dataclass(frozen=True)
class Variant:
    """One setting of a sweep. make: (rows, 0 to train or 1 to evaluate) -> the rows as this setting has them.

    every_pair: it starts from rows with their own pair's vector each, not from what was served. adds_to: the setting
    that rll_added compares with. tier: the one that this setting adds, which is also judged on its own rows.
    """

    sweep: str
    setting: str
    make: "Callable[[Rows, int], Rows]"
    every_pair: bool = False
    adds_to: str | None = None
    tier: str | None = None


def sweep_variants(
    settings: Sweeps, tiers: Sequence[str], parts: Sequence[Collected], *, every_pair: bool
) -> list[Variant]:
    """The settings to measure. tiers: the hierarchy's, in order. parts: the rows that train and those that evaluate.
    every_pair: whether rows with each pair are known.
    """
    from solaris_udf.tiers import TIER_CODES

    found = [
        Variant("coverage", f"{share:g}", partial(randomly_kept, share=share), every_pair)
        for share in sorted(settings.coverage_sweep)
    ]
    bought_at = [part.bought_at for part in parts]
    found += [
        Variant("budget", f"{share:g}", partial(bought_with, share=share, bought_at=bought_at))
        for share in sorted(settings.budget_sweep)
    ]
    if settings.tier_sweep:
        names = [" + ".join(tiers[: count + 1]) for count in range(len(tiers))]
        found += [
            Variant(
                "tier",
                name,
                partial(only_tiers, codes=[TIER_CODES[tier] for tier in name.split(" + ")]),
                adds_to=before,
                tier=tier,
            )
            for before, name, tier in zip([None, *names], names, tiers, strict=False)
        ]
    found += [Variant("ttl", f"{limit:g}", partial(young_pairs, hours=limit)) for limit in sorted(settings.ttl_sweep)]
    if settings.codec_sweep:
        found += [Variant("codec", codec, partial(stored_as, codec=codec)) for codec in ("float16", "int8")]
    return found


def only_tiers(rows: "Rows", part: int, codes: Sequence[int]) -> "Rows":
    return rows.only_tiers(codes)


def bought_with(rows: "Rows", part: int, share: float, bought_at: Sequence[Any]) -> "Rows":
    """Only the pairs that this share of the budget bought keep their vectors."""
    import numpy as np

    return rows.without(bought_at[part] > share, np.zeros(len(rows), dtype=bool))


def young_pairs(rows: "Rows", part: int, hours: float) -> "Rows":
    return rows.no_pair_older_than(hours)


def stored_as(rows: "Rows", part: int, codec: str) -> "Rows":
    return rows.stored_as(codec)


def randomly_kept(rows: "Rows", part: int, share: float) -> "Rows":
    """Only a random share of the rows keeps its vectors; of a smaller share, some of the same rows."""
    import numpy as np

    return rows.masked(np.random.default_rng(part).random(len(rows)) < share)


def sweep_figures(
    varied: Sequence[tuple[Variant, Any]], base: Any, part: Collected, seeds: list[int], replicates: int
) -> list[Stated]:
    """The figures of each variant's predictions [seeds, n] beside the base's, and of what it adds to the one before:
    over all rows, and for a tier also over those that it answered."""
    from solaris_udf.tiers import TIER_CODES

    earlier = {(variant.sweep, variant.setting): found for variant, found in varied}
    stating = _Stating(part, seeds, replicates)
    rows: list[Stated] = []
    for variant, found in varied:
        stated = stating.beside(base, found)
        before = base if variant.adds_to is None else earlier[variant.sweep, variant.adds_to]
        if variant.adds_to is not None:
            stated += stating.added(before, found)
        rows += [(variant.sweep, variant.setting, figure) for figure in stated]
        if variant.tier is not None:
            own = part.rows.tier == TIER_CODES[variant.tier]
            stated = stating.of_rows(own, base, before, found, f"no evaluation row was answered by {variant.tier}")
            rows += [("tier_rows", variant.tier, figure) for figure in stated]
    return rows


@dataclass(frozen=True)
class _Stating:
    """Figures of the embeddings' predictions [seeds, n] beside others; with own, a mask [n], of its rows alone."""

    part: Collected
    seeds: list[int]
    replicates: int

    def beside(self, other: Any, found: Any, own: Any = None) -> "list[Figure]":
        import numpy as np

        from solaris_udf.uplift import BASE, figures

        label, user = self.part.rows.label, self.part.user
        if own is not None:
            # Only the users who have such rows are drawn from: a draw of none of them would have no loss.
            label, user = label[own], np.unique(user[own], return_inverse=True)[1]
            other, found = other[:, own], found[:, own]
        stated = figures(label, user, {BASE: other, KEY: found}, self.seeds, self.replicates)
        return [
            replace(figure, rows=len(label))
            for figure in stated
            if figure.feature_set == KEY[1] and "transfer" not in figure.metric
        ]

    def added(self, before: Any, found: Any, own: Any = None) -> "list[Figure]":
        """rll_added: RLL against the predictions without the last thing."""
        from solaris_udf.uplift import ALL_SEEDS

        return [
            replace(figure, metric="rll_added")
            for figure in self.beside(before, found, own)
            if figure.metric == "rll" and figure.seed == ALL_SEEDS
        ]

    def of_rows(self, own: Any, base: Any, before: Any, found: Any, none: str) -> "list[Figure]":
        """Of a mask's rows, beside the base and beside the predictions without the last thing; none: if it has none."""
        from solaris_udf.uplift import ALL_SEEDS, Figure

        if not own.any():
            return [Figure(*KEY, ALL_SEEDS, "rll_added", None, note=none, rows=0)]
        return self.beside(base, found, own) + self.added(before, found, own)
