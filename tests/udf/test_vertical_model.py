import numpy as np
import pytest

from solaris_udf.metrics import auc, log_loss
from solaris_udf.tiers import NEIGHBOR_MEAN, NEIGHBOR_PAIR, PAIR, PAIR_TIERS, USER_MEAN
from solaris_udf.vertical_model import FEATURE_SETS, Schedule, train
from solaris_udf.vertical_rows import NO_ID, Rows, flags_of, nothing_served

DIM = 8
SCHEDULE = Schedule(epochs=6, batch=256, buckets=1 << 10, learning_rate=5e-3)


def made_rows(count: int, seed: int = 0, coverage: float = 1.0) -> Rows:
    """A click depends on a hidden match that only the pair's vector tells; ids carry a weak signal."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 50, count), rng.integers(0, 40, count)
    vector = rng.normal(size=(count, DIM)).astype(np.float32)
    logit = 2.0 * vector[:, 0] - 1.0 + np.where(item % 2 == 0, 0.7, -0.7)
    probability = 1 / (1 + np.exp(-logit))
    has = rng.random(count) < coverage
    code = np.where(has, 1, 0).astype(np.uint8)
    age, near = np.where(has, 3600, -1).astype(np.int32), has.astype(np.float32)
    none, unknown = np.zeros(count, np.uint8), np.full(count, -1, np.int32)
    ids = np.stack([user, item, item % 4, item % 3, user * 0, rng.integers(0, 24, count)], axis=1).astype(np.int64)
    return Rows(
        ids=ids,
        numbers=rng.normal(size=(count, 2)).astype(np.float32),
        flags=flags_of(code, age, near, none, unknown, np.zeros(count, np.float32)),
        pair=np.where(has[:, None], vector, 0).astype(np.float32),
        has_pair=has,
        user=np.zeros((count, DIM), np.float32),
        has_user=np.zeros(count, bool),
        label=(rng.random(count) < probability).astype(np.float32),
        soft=probability.astype(np.float32),
    )


@pytest.fixture(scope="module")
def trained():
    rows, later = made_rows(6000), made_rows(3000, seed=1)
    return (
        rows,
        later,
        {
            name: train(rows, FEATURE_SETS[name], seed=0, schedule=SCHEDULE).predict(later)
            for name in ("base", "embeddings", "both", "shuffled", "flags_only")
        },
    )


def test_vectors_help_and_the_controls_do_not(trained):
    _, later, predictions = trained
    loss = {name: log_loss(later.label, p) for name, p in predictions.items()}
    truth = log_loss(later.label, later.soft.astype(float))
    assert loss["embeddings"] < truth + 0.6 * (loss["base"] - truth)
    assert loss["embeddings"] < loss["base"] - 0.05
    assert abs(loss["flags_only"] - loss["base"]) < 0.02
    assert loss["shuffled"] > loss["base"] - 0.01
    assert auc(later.label, predictions["both"]) > auc(later.label, predictions["base"]) + 0.05


def test_a_model_is_made_again_by_its_seed_and_another_seed_differs(trained):
    rows, later, predictions = trained
    again = train(rows, FEATURE_SETS["embeddings"], seed=0, schedule=SCHEDULE).predict(later)
    assert (again == predictions["embeddings"]).all()
    assert (train(rows, FEATURE_SETS["embeddings"], seed=1, schedule=SCHEDULE).predict(later) != again).any()


def test_the_user_vector_is_read_together_with_the_item():
    """A user's taste vector against the item's side: only their product tells the click."""
    rng = np.random.default_rng(2)
    rows = made_rows(8000, seed=2)
    taste, side = rng.normal(size=(50, 1)), rng.choice([-1.0, 1.0], size=40)
    logit = 3.0 * taste[rows.ids[:, 0], 0] * side[rows.ids[:, 1]]
    users = np.arange(50)[rows.ids[:, 0]] + 1000 * rng.integers(0, 10**6, len(rows))  # ids never seen twice
    level = np.repeat(taste[rows.ids[:, 0]], DIM, axis=1).astype(np.float32)
    made = Rows(
        **{
            **rows.__dict__,
            "ids": np.concatenate([users[:, None], rows.ids[:, 1:]], axis=1),
            "user": level,
            "has_user": np.ones(len(rows), bool),
            "label": (rng.random(len(rows)) < 1 / (1 + np.exp(-logit))).astype(np.float32),
        }
    )
    model = train(made.take(slice(0, 6000)), FEATURE_SETS["user_only"], seed=0, schedule=SCHEDULE)
    later = made.take(slice(6000, 8000))
    assert auc(later.label, model.predict(later)) > 0.75


def test_soft_labels_alone_teach_the_auxiliary_head_and_missing_ones_are_left_out():
    rows = made_rows(2000)
    soft = rows.soft.copy()
    soft[::2] = np.nan
    model = train(Rows(**{**rows.__dict__, "soft": soft}), FEATURE_SETS["distillation"], seed=0, schedule=SCHEDULE)
    assert np.isfinite(model.predict(rows)).all()
    none = Rows(**{**rows.__dict__, "soft": np.full(2000, np.nan, np.float32)})
    assert np.isfinite(train(none, FEATURE_SETS["distillation"], seed=0, schedule=SCHEDULE).predict(rows)).all()


def test_the_last_rows_choose_the_epoch_and_never_train():
    rows = made_rows(4000)
    changed = Rows(**{**rows.__dict__, "label": np.concatenate([rows.label[:3400], 1 - rows.label[3400:]])})
    one = Schedule(epochs=1, batch=256, buckets=1 << 10)
    models = [train(made, FEATURE_SETS["base"], seed=0, schedule=one) for made in (rows, changed)]
    assert (models[0].predict(rows) == models[1].predict(rows)).all()


def test_one_class_is_refused_and_no_rows_predict_nothing():
    rows = made_rows(100)
    with pytest.raises(ValueError, match="not both clicked and not clicked"):
        train(Rows(**{**rows.__dict__, "label": np.zeros(100, np.float32)}), FEATURE_SETS["base"], seed=0)
    model = train(rows, FEATURE_SETS["base"], seed=0, schedule=SCHEDULE)
    assert model.predict(rows.take(slice(0, 0))).shape == (0,)


def test_masked_rows_look_as_if_nothing_had_been_served():
    rows = made_rows(10, coverage=1.0)
    keep = np.arange(10) < 3
    masked = rows.masked(keep)
    assert masked.has_pair.tolist() == keep.tolist()
    assert (masked.pair[3:] == 0).all() and (masked.flags[3:] == nothing_served(7)).all()
    assert (masked.pair[:3] == rows.pair[:3]).all() and (masked.flags[:3] == rows.flags[:3]).all()


def test_shuffling_moves_vectors_and_flags_together_and_nothing_else():
    rows = made_rows(200, coverage=0.5)
    shuffled = rows.shuffled(1)
    assert (shuffled.ids == rows.ids).all() and (shuffled.label == rows.label).all()
    assert (shuffled.has_pair != rows.has_pair).any()
    assert sorted(map(tuple, shuffled.pair)) == sorted(map(tuple, rows.pair))
    assert (shuffled.has_pair == (shuffled.flags[:, PAIR] == 1)).all()


def test_ids_of_all_64_bits_find_a_bucket_and_fields_differ():
    ids = np.array([[2**63 - 1, -5, 0, NO_ID, 7, 7]], dtype=np.int64)
    rows = made_rows(1)
    buckets = Rows(**{**rows.__dict__, "ids": ids}).buckets([1000] * 6)
    assert buckets[0, 3] == 0
    assert ((buckets[0, [0, 1, 2, 4, 5]] >= 1) & (buckets[0, [0, 1, 2, 4, 5]] < 1000)).all()
    assert buckets[0, 4] != buckets[0, 5]


def served_rows() -> Rows:
    """Four rows: own pair of 1 h, neighbour's pair of 7 h with the neighbour's mean, own mean of 3 h, nothing."""
    rows = made_rows(4)
    tier = np.array([PAIR, NEIGHBOR_PAIR, USER_MEAN, 0], np.uint8)
    user_tier = np.array([USER_MEAN, NEIGHBOR_MEAN, USER_MEAN, 0], np.uint8)
    age = np.array([3600, 7 * 3600, 3 * 3600, -1], np.int32)
    near = np.array([1, 0.5, 1, 0], np.float32)
    vector = np.arange(1, 4 * DIM + 1, dtype=np.float32).reshape(4, DIM) / 64
    has_pair, has_user = np.isin(tier, PAIR_TIERS), user_tier > 0
    return Rows(
        **{
            **rows.__dict__,
            "flags": flags_of(tier, age, near, user_tier, age, near),
            "pair": vector * has_pair[:, None],
            "has_pair": has_pair,
            "user": -vector * has_user[:, None],
            "has_user": has_user,
        }
    )


def test_tier_and_age_are_read_back_from_the_flags():
    rows = served_rows()
    assert rows.tier.tolist() == [PAIR, NEIGHBOR_PAIR, USER_MEAN, 0]
    assert rows.user_tier.tolist() == [USER_MEAN, NEIGHBOR_MEAN, USER_MEAN, 0]
    assert rows.age_seconds.tolist() == [3600, 25200, 10800, -1]


def test_rows_of_fewer_tiers_keep_theirs_and_lose_the_rest():
    rows = served_rows()
    own = rows.only_tiers([PAIR, USER_MEAN])
    assert (own.has_pair.tolist(), own.has_user.tolist()) == ([True, False, False, False], [True, False, True, False])
    assert own.tier.tolist() == [PAIR, 0, USER_MEAN, 0] and own.user_tier.tolist() == [USER_MEAN, 0, USER_MEAN, 0]
    assert (own.pair[0] == rows.pair[0]).all() and (own.pair[1] == 0).all() and (own.user[1] == 0).all()
    assert (own.flags[1] == nothing_served(1)[0]).all() and (own.flags[2] == rows.flags[2]).all()
    every = rows.only_tiers([PAIR, USER_MEAN, NEIGHBOR_PAIR, NEIGHBOR_MEAN])
    assert all((getattr(every, name) == getattr(rows, name)).all() for name in ("flags", "pair", "user"))


def test_an_old_pair_goes_and_the_user_vector_stays():
    rows = served_rows()
    young = rows.no_pair_older_than(7)  # one of exactly the limit's age is too old, as in the reader
    assert young.has_pair.tolist() == [True, False, False, False]
    assert young.has_user.tolist() == rows.has_user.tolist() and young.tier.tolist() == [PAIR, 0, USER_MEAN, 0]
    assert rows.no_pair_older_than(7.001).has_pair.tolist() == rows.has_pair.tolist()


def test_vectors_stored_as_int8_are_off_by_half_a_step_at_most():
    rows = served_rows()
    stored = rows.stored_as("int8")
    for name in ("pair", "user"):
        step = np.abs(getattr(rows, name)).max(axis=1, keepdims=True) / 127
        assert (np.abs(getattr(stored, name) - getattr(rows, name)) <= step / 2 + 1e-6).all()
    assert (rows.stored_as("float16").pair == rows.pair).all()  # 64ths are exact in float16


def test_rows_with_each_pair_lose_no_user_vector_and_a_missing_pair_keeps_what_was_served():
    rows = served_rows()
    vectors = np.full((4, DIM), 0.5, np.float32)
    vectors[2] = np.nan
    full = rows.with_pairs(vectors, np.full(4, 7200, np.int32))
    assert full.tier.tolist() == [PAIR, PAIR, USER_MEAN, PAIR] and full.age_seconds.tolist() == [
        7200,
        7200,
        10800,
        7200,
    ]
    assert full.has_pair.tolist() == [True, True, False, True]
    assert (full.pair[[0, 1, 3]] == 0.5).all() and (full.pair[2] == 0).all()
    assert (full.user == rows.user).all() and full.user_tier.tolist() == rows.user_tier.tolist()
