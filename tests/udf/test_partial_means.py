from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solaris_udf.codec import decode, encode
from solaris_udf.means import MICROS_PER_HOUR, Weighting
from solaris_udf.partial_means import means_of_sums, pair_sums

NOW = 1_000 * MICROS_PER_HOUR


def pairs_stream(rows, cuts):
    """Batches of (user, age in hours, item, vector, probability, sign) rows, sorted, cut at places."""
    ordered = sorted(rows, key=lambda row: (row[0], -row[1], row[2], row[5]))
    columns = list(zip(*ordered, strict=True)) if ordered else [[]] * 6
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(columns[0], pa.int64()),
            pa.array(columns[2], pa.int64()),
            pa.array([NOW - age * MICROS_PER_HOUR for age in columns[1]], pa.int64()),
            encode(np.array(columns[3])) if ordered else pa.array([], pa.binary()),
            pa.array(["float16"] * len(ordered), pa.string()),
            pa.array(columns[4], pa.float64()),
            pa.array([f"run {age}" for age in columns[1]], pa.string()),
            pa.array(columns[5], pa.int32()),
        ],
        names=["user_id", "item_id", "computed_micros", "embedding", "codec", "probability", "run_id", "sign"],
    )
    return cut(batch, cuts)


def cut(batch, cuts):
    places = [0, *sorted(min(place, batch.num_rows) for place in cuts), batch.num_rows]
    return [batch.slice(a, b - a) for a, b in pairwise(places)]


ROWS = st.lists(
    st.tuples(
        st.sampled_from([-(2**63), 0, 7, 2**63 - 1]),
        st.sampled_from([0, 1, 5, 23]),
        st.integers(0, 3),
        st.tuples(st.integers(-800, 800), st.integers(-8, 8)),
        st.one_of(st.none(), st.sampled_from([0.25, 1.0])),
        st.just(1),
    ),
    max_size=40,
    unique_by=lambda row: row[:3],
)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.data())
def test_sums_of_what_was_added_and_replaced_give_the_mean_of_the_latest(rows, data):
    """All rows are added at their time, and taken away when a later one of the pair comes."""
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=6))
    half_life, by_probability = data.draw(st.sampled_from([0.0, 6.0])), data.draw(st.booleans())
    latest, replaced = {}, []
    for row in sorted(rows, key=lambda row: -row[1]):
        if (row[0], row[2]) in latest:
            replaced.append((*latest[row[0], row[2]][:5], -1))
        latest[row[0], row[2]] = row
    partial = list(pair_sums(iter(pairs_stream([*rows, *replaced], cuts)), by_probability))
    keys = [(row["user_id"], row["computed_micros"]) for batch in partial for row in batch.to_pylist()]
    assert keys == sorted(set(keys))  # one row a user and time, wherever batches ended
    assert sum(sum(batch.column("pairs_seen").to_pylist()) for batch in partial) == len(rows)
    stored = [batch.select(["user_id", "computed_micros", "sums", "weight", "pair_count"]) for batch in partial]
    totals = {}
    for row in (row for batch in stored for row in batch.to_pylist()):
        decay = 0.5 ** ((NOW - row["computed_micros"]) / MICROS_PER_HOUR / half_life) if half_life else 1.0
        held = totals.setdefault(row["user_id"], [0.0, 0.0])
        held[0], held[1] = held[0] + decay * np.frombuffer(row["sums"], "<f8"), held[1] + decay * row["weight"]
    batches = cut(pa.Table.from_batches(stored).combine_chunks().to_batches()[0], cuts) if stored else []
    found = {}
    for batch in means_of_sums(iter(batches), Weighting(NOW, half_life, by_probability=False)):
        for row in batch.to_pylist():
            assert row["reason"] is None and row["user_id"] not in found
            found[row["user_id"]] = (decode([row["embedding"]])[0], row["pair_count"], row["newest_micros"])

    by_user = {}
    for row in latest.values():
        by_user.setdefault(row[0], []).append(row)
    assert found.keys() == by_user.keys()
    for user, kept in by_user.items():
        weights = [
            (0.5 ** (age / half_life) if half_life else 1.0) * (probability if by_probability and probability else 1.0)
            for _, age, _, _, probability, _ in kept
        ]
        mean = np.average([row[3] for row in kept], axis=0, weights=weights)
        total, weight = totals[user]
        assert total / weight == pytest.approx(mean, rel=6e-8, abs=1e-6)  # float32 rounding
        assert found[user][0] == pytest.approx(mean, rel=1e-3, abs=1e-3)  # stored as float16
        assert found[user][1:] == (len(kept), NOW - min(row[1] for row in kept) * MICROS_PER_HOUR)


def test_what_is_added_and_taken_away_leaves_nothing_behind():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(50, 3)).astype(np.float16).astype(np.float32) * 100
    added = [(1, 2, item, tuple(vector), None, 1) for item, vector in enumerate(vectors)]
    gone = [(*row[:5], -1) for row in added[:49]]
    (sums,) = pair_sums(iter(pairs_stream([*added, *gone], [])), False)
    left = np.frombuffer(sums.column("sums")[0].as_py(), "<f8")
    assert np.array_equal(left, vectors.astype(np.float16)[49].astype(np.float64))
    (mean,) = means_of_sums(iter([sums]), Weighting(NOW))
    assert np.array_equal(decode(mean.column("embedding"))[0], left) and mean.column("pair_count").to_pylist() == [1]


def test_a_bad_vector_is_refused_once_and_never_taken_away():
    (batch,) = pairs_stream([(1, 2, 3, (1.0, 2.0), None, 1), (1, 2, 4, (1.0, 2.0), None, -1)], [])
    bad = np.array([[np.nan, 1], [np.inf, 1]], "<f2")
    batch = batch.set_column(3, "embedding", pa.array([row.tobytes() for row in bad], pa.binary()))
    rows = [row for found in pair_sums(iter([batch]), False) for row in found.to_pylist()]
    assert [(row["reason"], row["pairs_seen"]) for row in rows] == [("the stored embedding has a NaN or an Inf", 1)]
    assert '"item_id": 3' in rows[0]["row"]


def test_vectors_of_one_version_have_one_length():
    batches = [pairs_stream([(1, age, 0, (1.0,) * width, None, 1)], [])[0] for age, width in ((3, 2), (2, 3))]
    with pytest.raises(ValueError, match="differ in length"):
        list(pair_sums(iter(batches), False))
    sums = [batch for each in batches for batch in pair_sums(iter([each]), False)]
    with pytest.raises(ValueError, match="differ in length"):
        list(means_of_sums(iter(sums), Weighting(NOW)))
