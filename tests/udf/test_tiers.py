import pytest

from solaris_udf.tiers import NEVER, NONE, TIER_CODES, TierPolicy


def test_ranks_are_places_in_the_order_and_codes_of_ranks_their_inverse():
    policy = TierPolicy.of_hours(("neighbor_pair", "user_mean"), 24, 48, 0.5)
    ranks = {name: int(policy.ranks[code]) for name, code in TIER_CODES.items()}
    assert ranks.pop("neighbor_pair") == 0 and ranks.pop("user_mean") == 1
    assert set(ranks.values()) == {NEVER}
    assert policy.codes_of_ranks[[0, 1, 2, NEVER]].tolist() == [TIER_CODES["neighbor_pair"], 2, NONE, NONE]


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
