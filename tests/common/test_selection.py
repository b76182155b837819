import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solaris_udf.selection import BUCKETS, UNIT_COSTS, Bucket, Costs, density_bucket, find_cut, select_pairs

PAIRS = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 2.0])), min_size=0, max_size=9
)


def spent(users, chosen, costs):
    return costs.total(len(set(users[chosen].tolist())), int(chosen.sum()))


def best_value(users, values, costs, budget):
    """The optimum by trying every subset."""
    best = 0.0
    for size in range(len(users) + 1):
        for subset in itertools.combinations(range(len(users)), size):
            if costs.total(len({int(users[place]) for place in subset}), size) <= budget:
                best = max(best, float(values[list(subset)].sum()))
    return best


@settings(max_examples=150, deadline=None)
@given(PAIRS, st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.floats(0.5, 14))
def test_the_choice_is_near_the_optimum_within_budget_and_stable(pairs, per_user, budget):
    users = np.array([user for user, _ in pairs], dtype=np.int64)
    items = np.arange(len(pairs), dtype=np.int64)
    values = np.array([value for _, value in pairs])
    costs = Costs(per_user, 1.0)
    chosen = select_pairs(users, items, values, costs, budget)
    assert spent(users, chosen, costs) <= budget
    best, value = best_value(users, values, costs, budget), float(values[chosen].sum())
    if per_user == 0:
        assert value == pytest.approx(best)  # every pair costs the same: greedy is the optimum
    # Greedy by density stops at the first user's prefix that does not fit whole; it loses at most what that one is
    # worth.
    largest = max((float(values[users == user].sum()) for user in set(users.tolist())), default=0.0)
    assert value >= best - largest - 1e-9
    order = np.random.default_rng(len(pairs)).permutation(len(pairs))
    np.testing.assert_array_equal(select_pairs(users[order], items[order], values[order], costs, budget), chosen[order])


@settings(max_examples=100, deadline=None)
@given(PAIRS.filter(lambda pairs: len(pairs) > 0), st.sampled_from([0.5, 2.0]), st.floats(0.5, 10))
def test_more_budget_never_buys_less(pairs, per_user, budget):
    users = np.array([user for user, _ in pairs], dtype=np.int64)
    items, values, costs = np.arange(len(pairs)), np.array([value for _, value in pairs]), Costs(per_user, 1.0)
    less = select_pairs(users, items, values, costs, budget)
    assert (select_pairs(users, items, values, costs, 2 * budget) | ~less).all()


def test_a_users_own_cost_decides_between_users():
    # Together user 1's pairs bring 1.5 for 3 + 3; user 2's best alone 0.9 for 3 + 1, both of user 2 1.0 for 3 + 2.
    users, items = np.array([1, 1, 1, 2, 2]), np.array([1, 2, 3, 1, 2])
    values = np.array([0.5, 0.5, 0.5, 0.9, 0.1])
    costs = Costs(3.0, 1.0)
    assert select_pairs(users, items, values, costs, 6.0).tolist() == [True, True, True, False, False]
    assert select_pairs(users, items, values, costs, 10.0).tolist() == [True, True, True, True, False]
    assert select_pairs(users, items, values, costs, 5.9).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]  # part of a prefix
    assert select_pairs(users, items, values, costs, 3.9).tolist() == [False] * 5
    assert select_pairs(users, items, values, UNIT_COSTS, 2.0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_no_budget_is_an_error(budget):
    with pytest.raises(ValueError, match="more than 0"):
        select_pairs(np.array([1]), np.array([1]), np.array([0.5]), UNIT_COSTS, budget)
    with pytest.raises(ValueError, match="more than 0"):
        find_cut([], UNIT_COSTS, budget)


@pytest.mark.parametrize("costs", [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_costs_that_can_not_be_are_refused(costs):
    with pytest.raises(ValueError, match="cost"):
        Costs(*costs)


def test_the_cut_and_what_more_budget_would_add():
    buckets = [Bucket(30, 10, 0, 1.0), Bucket(10, 4, 2, 8.0), Bucket(20, 10, 1, 5.0)]
    costs = Costs(2.0, 1.0)  # the buckets cost 8, 12 and 10
    cut = find_cut(buckets, costs, 14.0)
    assert (cut.bucket, cut.users, cut.pairs) == (20, 2, 4)
    assert cut.marginal_expected_rows == pytest.approx(5.0 * 1.4 / 12)
    assert find_cut(buckets, costs, 20.0).bucket == 30
    whole = find_cut(buckets, costs, 30.0)
    assert (whole.bucket, whole.users, whole.pairs, whole.marginal_expected_rows) == (BUCKETS, 3, 24, 0.0)


def test_buckets_keep_the_order_of_densities():
    density = np.array([2.0**20, 2.0**16, 1.0, 0.99, 0.5, 1e-3, 1e-30, 0.0])
    found = density_bucket(density)
    assert (np.diff(found) >= 0).all()
    assert found.tolist()[:3] == [0, 0, 16 * 64] and found[4] == 17 * 64 and found[-1] == BUCKETS - 1
