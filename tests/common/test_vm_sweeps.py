"""What the sweeps state of predictions, by hand: no model is trained here."""

import numpy as np
import pytest

from jobs.common.vm_rows import Collected
from jobs.common.vm_sweeps import Variant, sweep_figures
from solaris_udf.tiers import NONE, PAIR, USER_MEAN
from solaris_udf.vertical_rows import Rows, flags_of

TIERS = [PAIR, PAIR, USER_MEAN, USER_MEAN, USER_MEAN, NONE]
LABELS = [1, 0, 1, 0, 1, 0]


@pytest.fixture
def part():
    count = len(TIERS)
    tier, age, near = np.array(TIERS, np.uint8), np.full(count, 60, np.int32), np.ones(count, np.float32)
    empty = np.zeros((count, 2), np.float32)
    rows = Rows(
        ids=np.zeros((count, 6), np.int64),
        numbers=empty,
        flags=flags_of(tier, age, near, tier, age, near),
        pair=empty,
        has_pair=tier == PAIR,
        user=empty,
        has_user=tier == USER_MEAN,
        label=np.array(LABELS, np.float32),
        soft=near,
    )
    nothing = np.full(count, np.nan)
    moment = np.arange(count)
    user = np.array([0, 0, 1, 2, 2, 3])
    return Collected(rows, user, moment, moment, nothing, nothing, empty, nothing)


def right(chance):
    """Predictions [1 seed, n] that give what happened this chance."""
    return np.where(np.array(LABELS) == 1, chance, 1 - np.asarray(chance))[None]


def test_a_tier_is_judged_on_all_rows_and_on_those_that_it_answered(part):
    base, pair = right([0.5] * 6), right([0.8, 0.8, 0.5, 0.5, 0.5, 0.5])
    mean = right([0.7, 0.7, 0.6, 0.6, 0.9, 0.5])
    names = ["pair", "pair + user_mean", "pair + user_mean + cold"]
    varied = [
        (Variant("tier", names[0], None, tier="pair"), pair),
        (Variant("tier", names[1], None, adds_to=names[0], tier="user_mean"), mean),
        (Variant("tier", names[2], None, adds_to=names[1], tier="cold"), mean),
    ]
    stated = sweep_figures(varied, base, part, [0], 200)
    found = {(sweep, setting, one.metric): one for sweep, setting, one in stated if one.seed == -1}
    half = np.log(0.5)
    # On all six rows the pair's model has two better ones; it is no worse elsewhere.
    assert found["tier", "pair", "rll"].value == pytest.approx(100 * ((2 * np.log(0.8) + 4 * half) / (6 * half) - 1))
    assert ("tier", "pair", "rll_added") not in found
    with_pair, with_mean = 2 * np.log(0.8) + 4 * half, 2 * np.log(0.7) + 2 * np.log(0.6) + np.log(0.9) + half
    assert found["tier", names[1], "rll_added"].value == pytest.approx(100 * (with_mean / with_pair - 1))
    assert found["tier", names[1], "rll_added"].rows == 6
    # On its own rows each tier is held against the model without it: the base for the first one.
    own = found["tier_rows", "pair", "rll_added"]
    assert (own.value, own.rows) == (pytest.approx(100 * (np.log(0.8) / half - 1)), 2)
    assert own.ci_low == pytest.approx(own.ci_high)  # both rows are one user's: each draw is the same
    own = found["tier_rows", "user_mean", "rll_added"]
    assert (own.value, own.rows) == (pytest.approx(100 * ((2 * np.log(0.6) + np.log(0.9)) / (3 * half) - 1)), 3)
    # Two users: a draw has one of them twice or both.
    ends = [100 * (np.log(0.6) / half - 1), 100 * ((np.log(0.6) + np.log(0.9)) / (2 * half) - 1)]
    assert (own.ci_low, own.ci_high) == (pytest.approx(min(ends)), pytest.approx(max(ends)))
    assert (found["tier_rows", "cold", "rll_added"].value, found["tier_rows", "cold", "rll_added"].rows) == (None, 0)
