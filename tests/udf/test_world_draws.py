import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solaris_udf.world.draws import choose, fold, key, mix, normal, poisson, uniform, unmix
from solaris_udf.world.ids import broken_clock, hex_bytes, request_words, to_ids, to_numbers


def test_mix_is_the_finalizer_of_splitmix64():
    # The first outputs of the public reference implementation with seed 0: the state steps by the golden constant.
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, 2 * golden % 2**64, 3 * golden % 2**64], dtype=np.uint64)
    assert [int(word) for word in mix(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_unmix_undoes_mix(words):
    values = np.array(words, dtype=np.uint64)
    assert (unmix(mix(values)) == values).all()
    assert (mix(unmix(values)) == values).all()


def test_a_draw_depends_on_its_address_only():
    root = key(7, "stream")
    whole = fold(fold(root, np.arange(10))[:, None], np.arange(5))
    assert (fold(fold(root, np.array([3, 8]))[:, None], np.array([4, 1])) == whole[np.ix_([3, 8], [4, 1])]).all()
    assert int(fold(fold(root, 3), 4)[0]) == int(whole[3, 4])
    streams = ("a", "b", "a long name", "a long nam")
    assert len({int(key(seed, stream)[0]) for seed in (-1, 0, 1, 2**62) for stream in streams}) == 16


def test_uniforms_and_normals_have_their_moments_and_neighbours_are_independent():
    keys = fold(fold(key(1, "moments"), np.arange(1000))[:, None], np.arange(200))
    flat, bell = uniform(keys), normal(keys)
    assert flat.min() > 0 and flat.max() < 1
    counts = np.bincount((flat * 20).astype(int).ravel(), minlength=20)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8  # chi square, 19 degrees of freedom, p = 0.001
    assert abs(bell.mean()) < 0.01 and abs(bell.std() - 1) < 0.01 and abs((bell**4).mean() - 3) < 0.1
    for axis in (0, 1):
        near = np.corrcoef(
            np.take(bell, range(bell.shape[axis] - 1), axis).ravel(),
            np.take(bell, range(1, bell.shape[axis]), axis).ravel(),
        )[0, 1]
        assert abs(near) < 0.012


@pytest.mark.parametrize("rate", [0.0, 0.3, 4.0, 40.0])
def test_poisson_inverts_the_distribution_function(rate):
    keys = fold(key(2, "poisson"), np.arange(2000))
    counts = poisson(keys, np.full(2000, rate), 200)
    for chance, count in zip(uniform(keys)[:300], counts[:300], strict=True):
        below = sum(math.exp(-rate) * rate**k / math.factorial(k) for k in range(int(count)))
        assert below - 1e-9 <= chance < below + math.exp(-rate) * rate ** int(count) / math.factorial(int(count)) + 1e-9
    assert abs(counts.mean() - rate) <= 4 * math.sqrt(rate / 2000)
    assert poisson(keys, np.full(2000, 40.0), 3).max() == 3


def test_choose_takes_the_columns_of_the_smallest_keys():
    keys = fold(fold(key(3, "choose"), np.arange(50))[:, None], np.arange(9))
    for row, columns in zip(keys.tolist(), choose(keys, 4).tolist(), strict=True):
        assert columns == sorted(sorted(range(9), key=row.__getitem__)[:4])
    assert choose(keys, 20).tolist() == [list(range(9))] * 50


def test_ids_spread_over_64_bits_and_come_back():
    numbers = np.arange(100_000)
    for kind in ("user", "item", "advertiser"):
        ids = to_ids(kind, numbers)
        assert len(set(ids.tolist())) == len(numbers)
        assert (to_numbers(kind, ids) == numbers).all()
        assert 0.49 < (ids < 0).mean() < 0.51
        assert (np.abs(ids.astype(float)) > 2**53).mean() > 0.99
    assert not set(to_ids("user", numbers).tolist()) & set(to_ids("item", numbers).tolist())
    assert to_numbers("user", to_ids("user", 2**33 - 1)).tolist() == [2**33 - 1]


def test_request_ids_are_distinct_also_those_of_broken_clocks():
    users, index = (part.ravel() for part in np.meshgrid(np.array([0, 1, 77, 2**33 - 1]), np.arange(500)))
    words = np.concatenate([request_words(1, users, cell, index) for cell in (0, 1, 2**19)])
    both = np.concatenate([words, broken_clock(words)])
    assert len(set(both.tolist())) == 2 * 3 * 4 * 500
    assert not set(both.tolist()) & set(request_words(2, users, 0, index).tolist())
    assert hex_bytes(np.array([0xAB, 2**64 - 1], dtype=np.uint64)).tobytes() == b"00000000000000ab" + b"f" * 16
