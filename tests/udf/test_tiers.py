import numpy as np
import pytest

from solaris_udf.tiers import (
    NEIGHBOR_MEAN,
    NEIGHBOR_PAIR,
    PAIR,
    USER_MEAN,
    Candidates,
    TierPolicy,
    age_seconds,
    names_of,
    resolve_tiers,
)

HOUR = 3_600_000_000


def candidates(*rows, similarity=None):
    """rows: computed_at, or None where there is none."""
    return Candidates(
        np.array([row is not None for row in rows]),
        np.array([row or 0 for row in rows], np.int64),
        None if similarity is None else np.array(similarity, np.float32),
    )


def test_the_first_usable_tier_in_the_order_answers():
    offered = {
        PAIR: candidates(0, None, -24 * HOUR, None, None, 1),
        USER_MEAN: candidates(0, 0, 1 - 24 * HOUR, None, None, None),
        NEIGHBOR_PAIR: candidates(0, 0, 0, 0, None, 0, similarity=[1, 1, 1, 0.5, 1, 0.49]),
        NEIGHBOR_MEAN: candidates(0, 0, 0, 0, 0, 0, similarity=[1, 1, 1, 1, 0.5, 0.75]),
    }
    at = np.zeros(6, np.int64)
    usual = TierPolicy.of_hours(("pair", "user_mean", "neighbor_pair", "neighbor_mean"), 24, 48, 0.5)
    # Row 2's pair is exactly the TTL old; row 5's pair is of the future and its neighbour's pair too dissimilar.
    assert names_of(resolve_tiers(usual, offered, at)) == [
        "pair",
        "user_mean",
        "user_mean",
        "neighbor_pair",
        "neighbor_mean",
        "neighbor_mean",
    ]
    other = TierPolicy.of_hours(("neighbor_pair", "user_mean"), 24, 48, 0.5)
    assert names_of(resolve_tiers(other, offered, at)) == [
        "neighbor_pair",
        "neighbor_pair",
        "neighbor_pair",
        "neighbor_pair",
        "none",
        "none",
    ]
    assert names_of(resolve_tiers(other, {}, at[:2])) == ["none", "none"]


def test_each_kind_of_vector_has_its_own_age_limit():
    policy = TierPolicy.of_hours(("pair", "user_mean"), 6, 12, 0)
    for hours_old, tier in ((0, "pair"), (5.9, "pair"), (6, "user_mean"), (11.9, "user_mean"), (12, "none")):
        at = np.array([round(hours_old * HOUR)])
        assert names_of(resolve_tiers(policy, {PAIR: candidates(0), USER_MEAN: candidates(0)}, at)) == [tier]


def test_ages_are_whole_seconds_rounded_down_and_minus_one_for_none():
    served = np.array([True, True, True, False])
    ages = age_seconds(np.array([0, 0, 0, 0]), np.array([0, 999_999, 1_000_000, 5]), served)
    assert (ages.tolist(), ages.dtype) == ([0, 0, 1, -1], np.int32)


@pytest.mark.parametrize(
    ("order", "hours", "similarity", "message"),
    [
        (("pair", "none"), 1, 0, "unknown tiers"),
        (("pair", "pair"), 1, 0, "twice"),
        (("pair",), 0, 0, "positive"),
        (("pair",), 1, 1.5, "min_similarity"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(order, hours, similarity, message):
    with pytest.raises(ValueError, match=message):
        TierPolicy.of_hours(order, hours, hours, similarity)
