"""Which pairs a budget buys: the definition of the selection, in numpy, for one machine.

`jobs/common/selection.py` computes the same choice distributed; this one is what it is checked against, and what small
tools use on candidates that fit in memory.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Densities are counted in buckets that are 1/64 of a power of two wide, from 2^16 rows a pair down to 2^-48.
BUCKETS_PER_DOUBLING = 64
TOP_DOUBLING = 16
BUCKETS = 4096


@dataclass(frozen=True)
class Costs:
    """What the foundation model's work costs, in any one unit: a user's first pair pays both."""

    per_user: float
    per_pair: float

    def __post_init__(self) -> None:
        if not (self.per_pair > 0 and self.per_user >= 0 and np.isfinite(self.per_pair + self.per_user)):
            raise ValueError(f"a pair must cost more than 0 and a user at least 0, both finite, not {self}")

    def total(self, users: int, pairs: int) -> float:
        """Cost of that many pairs of that many users."""
        return users * self.per_user + pairs * self.per_pair


UNIT_COSTS = Costs(per_user=0.0, per_pair=1.0)


@dataclass(frozen=True)
class Bucket:
    """The candidates of one density bucket: how many pairs, how many of them are their user's first, their rows."""

    bucket: int
    pairs: int
    firsts: int
    expected_rows: float


@dataclass(frozen=True)
class Cut:
    """Where the budget ends: buckets before `bucket` are taken whole, of that one as much as `users`, `pairs` leave
    room for. bucket is BUCKETS if everything fits. marginal_expected_rows: what 10% more budget would add."""

    bucket: int
    users: int
    pairs: int
    marginal_expected_rows: float


def density_bucket(density: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The bucket of each density (expected rows per cost of one pair), densest first: 0 to BUCKETS - 1."""
    with np.errstate(divide="ignore"):
        place = np.floor((TOP_DOUBLING - np.log2(density)) * BUCKETS_PER_DOUBLING)
    found: npt.NDArray[np.int64] = np.clip(place, 0, BUCKETS - 1).astype(np.int64)
    return found


def find_cut(buckets: list[Bucket], costs: Costs, budget: float) -> Cut:
    """Walks the buckets densest first until the next one no longer fits whole.

    Raises ValueError if the budget is not more than 0.
    """
    if not budget > 0:
        raise ValueError(f"the budget must be more than 0, not {budget}")
    users = pairs = 0
    cut: Cut | None = None
    below = 0.0  # expected rows that fit the budget
    more = 0.0  # that fit 110% of it
    for bucket in sorted(buckets, key=lambda each: each.bucket):
        before = costs.total(users, pairs)
        cost = costs.total(bucket.firsts, bucket.pairs)
        if cut is None and before + cost > budget:
            cut = Cut(bucket.bucket, users, pairs, 0.0)
        below += bucket.expected_rows * min(1.0, max(0.0, (budget - before) / cost))
        more += bucket.expected_rows * min(1.0, max(0.0, (1.1 * budget - before) / cost))
        users, pairs = users + bucket.firsts, pairs + bucket.pairs
        if before > 1.1 * budget:
            break
    end = cut or Cut(BUCKETS, users, pairs, 0.0)
    return Cut(end.bucket, end.users, end.pairs, more - below)


def select_pairs(
    users: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64],
    expected_rows: npt.NDArray[np.float64],
    costs: Costs,
    budget: float,
) -> npt.NDArray[np.bool_]:
    """Chooses pairs [n] (unique) for the most expected rows under the budget; returns who is chosen, bool [n].

    Greedy by density. A user's pairs are ranked by expected rows; the density of a pair is its expected rows per cost,
    but not more than the best ratio that any prefix of its user's list reaches once the user's own cost is paid. So
    the pairs of a best prefix share one density and are taken together, and what follows competes alone (the concave
    hull of each user's value over cost). Pairs are taken densest first, ties by user, then rank, while they fit; the
    first that does not fit ends it. The value is at least the optimum's less that of the one prefix or pair that was
    cut.

    Raises ValueError if the budget is not more than 0.
    """
    if not budget > 0:
        raise ValueError(f"the budget must be more than 0, not {budget}")
    count = len(users)
    if count == 0:
        return np.zeros(0, dtype=bool)
    order = np.lexsort((items, -expected_rows, users))
    user, value = users[order], expected_rows[order].astype(np.float64)
    starts = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    lengths = np.diff(np.r_[starts, count])
    rank = np.arange(count) - np.repeat(starts, lengths) + 1
    density = np.empty(count)
    for start, length in zip(starts, lengths, strict=True):
        mine = value[start : start + length]
        ratio = np.cumsum(mine) / (costs.per_user / costs.per_pair + rank[start : start + length])
        density[start : start + length] = np.minimum(mine, ratio.max())
    best = np.lexsort((rank, user, -density))
    pairs = np.arange(1, count + 1)
    firsts = np.cumsum(rank[best] == 1)
    fits = firsts * costs.per_user + pairs * costs.per_pair <= budget
    taken = best[: int(np.argmin(fits)) if not fits.all() else count]
    chosen = np.zeros(count, dtype=bool)
    chosen[order[taken]] = True
    return chosen
