"""The promises of inference, tested with fake models that need no torch."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solaris_udf.codec import decode
from solaris_udf.foundation.contract import Description
from solaris_udf.foundation.features import ModelError, check_names
from solaris_udf.foundation.inference import Limits, embed_batches, plan_groups
from solaris_udf.foundation.items import ITEM_SCHEMA, ItemTable, write_item_file
from solaris_udf.foundation.model import Model
from solaris_udf.foundation.users import padded_length

AT = datetime(2026, 1, 3, tzinfo=UTC)
EVENT = pa.struct([("item_id", pa.int64()), ("event_time", pa.timestamp("us", tz="UTC"))])
SHOWN = pa.struct([*EVENT, ("clicked", pa.bool_())])
SCHEMA = pa.schema(
    [
        ("user_id", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("shown", pa.list_(SHOWN)),
        ("clicked", pa.list_(EVENT)),
        *[(name, pa.int64()) for name in ("requests", "scored_rows", "shown_rows", "clicked_rows")],
        ("item_ids", pa.list_(pa.int64())),
    ]
)
LOW, HIGH = -(2**63), 2**63 - 1


@pytest.fixture
def items(tmp_path):
    values = [
        (HIGH, 3, None, AT - timedelta(hours=5), None),
        (LOW, None, 9, None, [1.0, 2.0]),
        (7, 4, 8, AT + timedelta(hours=1), [3.0, None]),
    ]
    rows = [dict(zip(ITEM_SCHEMA.names, value, strict=True)) for value in values]
    write_item_file([pa.RecordBatch.from_pylist(rows, schema=ITEM_SCHEMA)], tmp_path / "items.arrow")
    return ItemTable.open(tmp_path / "items.arrow")


def user(user_id, item_ids, clicked=(), **more):
    events = [{"item_id": item, "event_time": AT - timedelta(hours=age)} for item, age in clicked]
    return {"user_id": user_id, "at": AT, "shown": None, "clicked": events, "item_ids": item_ids, **more}


def batch(*rows):
    return pa.RecordBatch.from_pylist([{**dict.fromkeys(SCHEMA.names), **row} for row in rows], schema=SCHEMA)


def with_probabilities(rows, *lists):
    return rows.append_column("probabilities", pa.array(lists, pa.list_(pa.float64())))


class Fake:
    """Records its calls. The embedding: events of the user, item id mod 100, 1."""

    def __init__(self, inputs=("clicked_mask", "item_id"), memory=math.inf, embed=None, dim=3):
        self.users, self.pairs, self.memory, self.dim = [], [], memory, dim
        files = {"user_encoder.pt2": "", "pair_head.pt2": ""}
        self.description = Description(
            "fake", "m1", dim, check_names(inputs), {"clicked": 4, "shown": 4}, 0, ("click",), 1.0, 1.0, files
        )
        self.embed = embed or (
            lambda state, index, items: np.stack(
                [state["clicked_mask"].sum(1)[index], items["item_id"] % 100, np.ones(len(index))], axis=1
            )
        )

    def model(self):
        return Model(self.description, self.encode, self.pair)

    def encode(self, users):
        if next(iter(users.values())).size > self.memory:
            raise RuntimeError("CUDA out of memory")
        self.users.append(users)
        return users

    def pair(self, state, index, items):
        if len(index) * next(iter(state.values())).shape[1] > self.memory:
            raise MemoryError
        self.pairs.append(items)
        out = self.embed(state, index, items).astype(np.float32), np.arange(len(index), dtype=np.float32)[:, None]
        return lambda: out


def run(fake, items, *batches, **options):
    table = pa.Table.from_batches(list(embed_batches(batches, fake.model(), items, **options)))
    return table.sort_by([("user_id", "ascending"), ("item_id", "ascending")]).to_pylist()


def test_a_pairs_probability_goes_along_whatever_the_order_of_work(items):
    users = [user(1, [7, None, 8, 9], [(7, 1)] * 3), user(2, None), user(3, [4, 5]), user(4, [6], [(7, 1)])]
    given = with_probabilities(batch(*users), [0.7, 0.0, None, 0.9], None, [0.4, 0.5], [0.6])
    rows = run(Fake(), items, given, limits=Limits(pairs=2))
    found = {(row["user_id"], row["item_id"]): row["probability"] for row in rows}
    assert found == {(1, 7): 0.7, (1, None): None, (1, 8): None, (1, 9): 0.9, (3, 4): 0.4, (3, 5): 0.5, (4, 6): 0.6}
    with pytest.raises(ValueError, match="3 probabilities for 2 item_ids"):
        run(Fake(), items, with_probabilities(batch(user(1, [7, 8])), [0.1, 0.2, 0.3]))


def test_ids_at_the_ends_of_int64_with_nulls_beside_them(items):
    rows = run(Fake(), items, batch(user(LOW, [HIGH, None, LOW]), user(HIGH, [2**53 + 1], [(7, 1)]), user(5, None)))
    # 2**63 - 1 = ...807, -(2**63) = ...808 below zero, 2**53 + 1 = 9007199254740993
    assert [(row["user_id"], row["item_id"], row["reason"]) for row in rows] == [
        (LOW, LOW, None),
        (LOW, HIGH, None),
        (LOW, None, "item_id is null"),
        (HIGH, 2**53 + 1, None),
    ]
    vectors = [decode([row["embedding"]])[0].tolist() for row in rows if row["embedding"]]
    assert vectors == [[0, 92, 1], [0, 7, 1], [1, 93, 1]]
    assert all(row["at"] == AT and row["logits"] is None for row in rows)


def test_item_features_and_the_defaults_of_unknown_items_and_nulls(items):
    seen = Fake(
        (
            "clicked_category",
            "clicked_advertiser",
            "clicked_age_hours",
            "clicked_mask",
            "user_counts",
            "user_id",
            "item_id",
            "item_category",
            "item_advertiser",
            "item_age_hours",
            "item_dense",
        ),
        embed=lambda state, index, items: np.zeros((len(index), 3)),
    )
    run(seen, items, batch(user(1, [HIGH, LOW, 7, 55], [(55, 3), (7, 1.5), (HIGH, 0)], requests=3)))
    pairs, users = seen.pairs[0], seen.users[0]
    assert pairs["item_category"].tolist() == [3, 0, 4, 0] and pairs["item_advertiser"].tolist() == [0, 9, 8, 0]
    assert pairs["item_age_hours"].tolist() == [5, 0, 0, 0]
    assert pairs["item_dense"].tolist() == [[0, 0], [1, 2], [3, 0], [0, 0]]
    # Oldest first, padded right; the event at `at` itself is the future.
    assert users["clicked_category"][0, :3].tolist() == [0, 4, 0]
    assert users["clicked_age_hours"][0, :3].tolist() == [3, 1.5, 0]
    assert users["clicked_mask"].sum() == 2 and users["clicked_mask"].shape == (1, 8)
    assert users["user_counts"].tolist() == [[pytest.approx(math.log(4)), 0, 0, 0]] and users["user_id"].tolist() == [1]


def test_a_history_is_cut_to_its_latest_events(items):
    fake = Fake(("clicked_item", "clicked_mask", "item_id"))
    run(fake, items, batch(user(1, [1], [(10 + n, 9 - n) for n in range(9)])))
    assert fake.users[0]["clicked_item"][0, :5].tolist() == [15, 16, 17, 18, 0]


def test_a_giant_user_is_encoded_once_and_batches_stay_bounded(items):
    fake = Fake()
    rows = sum(
        len(out)
        for out in embed_batches(
            [batch(user(1, list(range(200_000)), [(7, 1)]))], fake.model(), items, limits=Limits(tokens=8000, pairs=900)
        )
    )
    assert rows == 200_000 and len(fake.users) == 1
    assert max(len(pairs["item_id"]) for pairs in fake.pairs) == 900
    assert np.array_equal(np.concatenate([pairs["item_id"] for pairs in fake.pairs]), np.arange(200_000))


def test_out_of_memory_halves_the_batch_and_loses_nothing(items):
    fake = Fake(memory=40)  # five users or pairs of eight padded events
    rows = run(fake, items, batch(*[user(u, list(range(30)), [(7, 1)]) for u in range(20)]))
    assert [(row["user_id"], row["item_id"]) for row in rows] == [(u, i) for u in range(20) for i in range(30)]
    assert sum(len(pairs["item_id"]) for pairs in fake.pairs) == 600  # each pair once
    assert max(len(pairs["item_id"]) for pairs in fake.pairs) <= 5
    with pytest.raises(RuntimeError, match="out of memory"):  # a single user is too much: nothing is left to halve
        run(Fake(memory=7), items, batch(user(1, [1], [(7, 1)])))
    broken = Fake(embed=lambda state, index, items: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(broken, items, batch(user(1, [1, 2])))


@pytest.mark.parametrize(("codec", "big_is_bad"), [("float16", True), ("int8", False)])
def test_nan_inf_and_overflow_are_refused_with_a_reason(items, codec, big_is_bad):
    values = np.array([[1, 2, 3], [np.nan, 0, 0], [0, np.inf, 0], [70000, 0, 0]], dtype=np.float32)
    rows = run(
        Fake(embed=lambda state, index, items: values[items["item_id"]]),
        items,
        batch(user(1, [0, 1, 2, 3])),
        codec=codec,
        logits=True,
    )
    bad = [row["item_id"] for row in rows if row["reason"] == "embedding is not finite" and row["embedding"] is None]
    assert bad == ([1, 2, 3] if big_is_bad else [1, 2])
    assert decode([rows[0]["embedding"]], codec)[0] == pytest.approx([1, 2, 3], abs=0.02) and rows[2]["logits"] == [2.0]
    all_bad = run(Fake(embed=lambda s, index, i: np.full((len(index), 3), np.nan)), items, batch(user(1, [0, 1])))
    assert [row["embedding"] for row in all_bad] == [None, None]


def test_wrong_dimension_is_refused_and_a_wrong_number_of_rows_stops(items):
    rows = run(Fake(embed=lambda state, index, items: np.zeros((len(index), 2))), items, batch(user(1, [4])))
    assert [row["reason"] for row in rows] == ["embedding has 2 dimensions, the model declares 3"]
    with pytest.raises(ModelError, match=r"embeddings \(1, 3\) .* for 2 pairs"):
        run(Fake(embed=lambda state, index, items: np.zeros((1, 3))), items, batch(user(1, [4, 5])))


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 2000))
def test_groups_hold_every_user_once_and_keep_the_bound(lengths, tokens):
    lengths = np.array(lengths, dtype=np.int64)
    groups = plan_groups(lengths, tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * padded_length(lengths[group].max()) <= tokens


def test_items_without_features_and_an_empty_table(tmp_path):
    write_item_file([], tmp_path / "none.arrow")
    empty = ItemTable.open(tmp_path / "none.arrow")
    assert empty.rows_of(np.array([1, 2])).tolist() == [-1, -1] and empty.dense(np.array([-1])).shape == (1, 0)
    assert empty.category(np.array([-1])).tolist() == [0]
    rows = [{"item_id": n, "features": [0.0] * n} for n in (1, 2)]
    with pytest.raises(ValueError, match=r"different lengths: \[1, 2\]"):
        write_item_file(
            [
                pa.RecordBatch.from_pylist(
                    [{**dict.fromkeys(ITEM_SCHEMA.names), **row} for row in rows], schema=ITEM_SCHEMA
                )
            ],
            tmp_path / "bad.arrow",
        )
