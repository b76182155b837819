from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solaris_udf.codec import decode, encode
from solaris_udf.means import MICROS_PER_HOUR, Weighting, user_means

NOW = 1_000 * MICROS_PER_HOUR


def stream(rows, cuts=()):
    """Batches of (user, item, age in hours, vector, probability) rows in the order of the contract, cut at places."""
    ordered = sorted(rows, key=lambda row: (row[0], row[1], row[2]))
    columns = list(zip(*ordered, strict=True)) if ordered else [[]] * 5
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(columns[0], pa.int64()),
            pa.array(columns[1], pa.int64()),
            pa.array([NOW - int(age * MICROS_PER_HOUR) for age in columns[2]], pa.int64()),
            pa.array([np.asarray(vector, "<f2").tobytes() for vector in columns[3]], pa.binary()),
            pa.array(["float16"] * len(ordered)),
            pa.array(columns[4], pa.float64()),
        ],
        names=["user_id", "item_id", "computed_micros", "embedding", "codec", "probability"],
    )
    places = [0, *sorted(cuts), len(ordered)]
    return [batch.slice(a, b - a) for a, b in pairwise(places)]


def means(rows, cuts=(), **weighting):
    batches = user_means(iter(stream(rows, cuts)), Weighting(NOW, **weighting))
    return [row for batch in batches for row in batch.to_pylist()]


ROWS = st.lists(
    st.tuples(
        st.sampled_from([-(2**63), -1, 0, 7, 2**63 - 1]),
        st.integers(0, 3),
        st.sampled_from([0, 1, 5, 23]),
        st.tuples(st.integers(-8, 8), st.integers(-8, 8)),
        st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])),
    ),
    max_size=40,
    unique_by=lambda row: row[:3],
)


@settings(max_examples=150)
@given(ROWS, st.data())
def test_means_are_those_of_the_latest_row_per_pair_wherever_batches_end(rows, data):
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=6))
    half_life, by_probability = data.draw(st.sampled_from([0.0, 6.0])), data.draw(st.booleans())
    latest = {}
    for user, item, age, vector, probability in sorted(rows, key=lambda row: -row[2]):
        latest[user, item] = (age, vector, probability)
    expected = {}
    for user in {user for user, _ in latest}:
        own = [value for (owner, _), value in latest.items() if owner == user]
        weights = [
            (0.5 ** (age / half_life) if half_life else 1)
            * (max(1.0 if probability is None else probability, 1e-6) if by_probability else 1)
            for age, _, probability in own
        ]
        mean = [sum(w * v[axis] for w, (_, v, _) in zip(weights, own, strict=True)) / sum(weights) for axis in (0, 1)]
        expected[user] = (mean, len(own), NOW - min(age for age, _, _ in own) * MICROS_PER_HOUR)
    found = means(rows, cuts, half_life_hours=half_life, by_probability=by_probability)
    assert [row["user_id"] for row in found] == sorted(expected)
    for row in found:
        mean, pairs, newest = expected[row["user_id"]]
        assert decode([row["embedding"]])[0] == pytest.approx(mean, rel=1e-3, abs=1e-6)
        assert (row["pair_count"], row["newest_micros"], row["pairs_seen"]) == (pairs, newest, pairs)
    assert means(rows, half_life_hours=half_life, by_probability=by_probability) == found


def test_a_sum_does_not_depend_on_where_batches_end_to_the_last_bit():
    generator = np.random.default_rng(1)
    rows = [(1, item, float(generator.uniform(0, 20)), generator.normal(size=3), 0.5) for item in range(500)]
    whole = means(rows, half_life_hours=3.0)
    assert means(rows, range(1, 500, 7), half_life_hours=3.0) == whole
    assert means(rows, range(1, 500), half_life_hours=3.0) == whole


def test_a_vector_that_is_not_finite_is_refused_and_the_rest_counts():
    found = means([(1, 1, 0, (1, 2), None), (1, 2, 0, (np.inf, 2), None), (2, 1, 0, (np.nan, 0), None)])
    refused, kept = [row for row in found if row["reason"]], [row for row in found if not row["reason"]]
    assert [row["row"] for row in refused] == [
        f'{{"user_id": {user}, "item_id": {item}, "computed_micros": {NOW}}}' for user, item in ((1, 2), (2, 1))
    ]
    assert [(row["user_id"], row["pair_count"]) for row in kept] == [(1, 1)]
    assert decode([kept[0]["embedding"]])[0].tolist() == [1, 2]


def test_codecs_may_be_mixed_and_a_mean_beyond_float16_is_refused():
    def row(user, item, vector, codec):
        return pa.RecordBatch.from_pydict(
            {
                "user_id": pa.array([user], pa.int64()),
                "item_id": pa.array([item], pa.int64()),
                "computed_micros": pa.array([NOW], pa.int64()),
                "embedding": encode([vector], codec),
                "codec": [codec],
                "probability": pa.array([None], pa.float64()),
            }
        )

    rows = [row(1, 1, [127, 0], "int8"), row(1, 2, [1, 2], "float16"), row(2, 1, [1e6, 0], "int8")]
    merged = pa.Table.from_batches(rows).combine_chunks().to_batches()
    found = [found for batch in user_means(iter(merged), Weighting(NOW)) for found in batch.to_pylist()]
    assert decode([found[0]["embedding"]])[0].tolist() == [64, 1]
    assert (found[1]["embedding"], found[1]["reason"], found[1]["row"]) == (
        None,
        "the mean does not fit float16",
        '{"user_id": 2}',
    )


def test_lengths_that_differ_within_a_version_are_an_error():
    with pytest.raises(ValueError, match="differ in length"):
        means([(1, 1, 0, (1, 2), None), (1, 2, 0, (1, 2, 3), None)])
