import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solaris_udf.metrics import (
    auc,
    auc_influence,
    by_user,
    calibration,
    entropy,
    interval,
    log_loss,
    losses,
    normalized_entropy,
    relative_log_loss,
    resample,
    transfer_ratio,
)


def test_log_loss_by_hand():
    # -ln(0.8), -ln(1 - 0.5), -ln(0.25)
    assert losses([1, 0, 1], [0.8, 0.5, 0.25]) == pytest.approx([0.22314355, 0.69314718, 1.38629436])
    assert log_loss([1, 0, 1], [0.8, 0.5, 0.25]) == pytest.approx(0.76752836)
    assert math.isnan(log_loss([], []))


def test_a_certain_mistake_costs_a_finite_loss():
    assert log_loss([1], [0.0]) == pytest.approx(-math.log(1e-7))
    assert log_loss([0], [1.0]) == pytest.approx(-math.log(1e-7), rel=1e-6)


def test_normalized_entropy_by_hand():
    # base rate 1/4: H = -(0.25 ln 0.25 + 0.75 ln 0.75) = 0.56233514; losses -ln(0.5) and 3 x -ln(0.9)
    assert entropy(0.25) == pytest.approx(0.56233514)
    mean_loss = (0.69314718 + 3 * 0.10536052) / 4
    assert normalized_entropy([1, 0, 0, 0], [0.5, 0.1, 0.1, 0.1]) == pytest.approx(mean_loss / 0.56233514)
    assert normalized_entropy([1, 0, 0, 0], [0.25] * 4) == pytest.approx(1.0)
    assert math.isnan(normalized_entropy([0, 0], [0.1, 0.1]))
    assert entropy([0.0, 1.0]).tolist() == [0.0, 0.0]


def test_relative_log_loss_and_transfer_ratio_by_hand():
    assert relative_log_loss(0.495, 0.5) == pytest.approx(-1.0)
    assert transfer_ratio(0.9275, 0.9051, 0.8878) == pytest.approx(0.0224 / 0.0397)
    assert math.isnan(transfer_ratio(0.9, 0.8, 0.9)) and math.isnan(relative_log_loss(0.5, 0.0))
    # Elementwise, as a bootstrap's draws are.
    assert transfer_ratio([0.9, 1.0], [0.8, 1.1], [0.5, 0.8]) == pytest.approx([0.25, -0.5])
    assert relative_log_loss([0.3, 0.6], [0.4, 0.5]) == pytest.approx([-25, 20])


def test_auc_counts_ties_half():
    assert auc([0, 1], [0.1, 0.9]) == 1.0
    assert auc([1, 0], [0.5, 0.5]) == 0.5
    # positives 0.4, 0.7; negatives 0.4, 0.1: pairs 0.5 + 1 + 1 + 1 of 4
    assert auc([1, 1, 0, 0], [0.4, 0.7, 0.4, 0.1]) == pytest.approx(3.5 / 4)
    assert math.isnan(auc([1, 1], [0.2, 0.3]))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_auc_is_the_share_of_ordered_pairs(rows):
    positive = [value for label, value in rows if label]
    negative = [value for label, value in rows if not label]
    if positive and negative:
        wins = sum((a > b) + 0.5 * (a == b) for a in positive for b in negative)
        assert auc([int(label) for label, _ in rows], [value / 10 for _, value in rows]) == pytest.approx(
            wins / (len(positive) * len(negative))
        )


def test_calibration_by_hand():
    assert calibration([1, 0, 0, 1], [0.5, 0.25, 0.25, 0.5]) == pytest.approx(0.75)
    assert math.isnan(calibration([0], [0.1]))


@pytest.mark.parametrize(
    ("y", "p", "message"),
    [
        ([0, 2], [0.1, 0.1], "neither 0 nor 1"),
        ([0], [float("nan")], "not a number"),
        ([0], [1.5], "outside"),
        ([0, 1], [0.1], "one length"),
    ],
)
def test_what_is_no_prediction_is_refused(y, p, message):
    with pytest.raises(ValueError, match=message):
        log_loss(y, p)


def test_resampling_two_users_gives_the_three_possible_totals():
    # Two users are drawn twice: totals 2a, a + b or 2b with probabilities 1/4, 1/2, 1/4.
    drawn = resample({"loss": [1.0, 10.0], "rows": [1.0, 1.0]}, replicates=4000, seed=3)
    assert drawn.point == {"loss": 11.0, "rows": 2.0}
    assert (drawn.draws["rows"] == 2.0).all()
    values, counts = np.unique(drawn.draws["loss"], return_counts=True)
    assert values.tolist() == [2.0, 11.0, 20.0]
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_resampling_is_paired_over_users_and_seeds():
    rng = np.random.default_rng(0)
    base = rng.normal(size=(3, 50)) * 100
    drawn = resample({"base": base, "new": base - 1.0, "fm": np.ones(50)}, replicates=200, seed=1)
    # every draw holds 50 users, so the difference is 50 in each, however noisy the totals are
    assert drawn.draws["base"] - drawn.draws["new"] == pytest.approx(np.full(200, 50.0))
    assert drawn.draws["base"].std() > 100
    assert drawn.point["base"] == pytest.approx(base.sum(axis=1).mean())
    # one user only: what is left varies by seed alone, means of three draws out of (0, 3, 6)
    by_seed = resample({"x": [[0.0], [3.0], [6.0]]}, replicates=500, seed=1).draws["x"]
    assert set(np.round(by_seed, 6)) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        sample = rng.exponential(size=60)
        low, high = interval(resample({"x": sample}, 300, trial).draws["x"] / 60)
        hits += low <= 1.0 <= high
    assert 0.85 <= hits / 200 <= 0.99


def test_same_seed_same_draws_in_chunks_of_any_size(monkeypatch):
    sums = {"x": np.arange(30.0)}
    whole = resample(sums, 50, 7).draws["x"]
    assert (resample(sums, 50, 7).draws["x"] == whole).all()
    monkeypatch.setattr("solaris_udf.metrics._CHUNK_CELLS", 90)
    assert (resample(sums, 50, 7).draws["x"] == whole).all()


def test_rows_are_summed_by_user():
    user = np.array([2, 0, 2])
    assert by_user([1.0, 2.0, 4.0], user, 3).tolist() == [2.0, 0.0, 5.0]
    assert by_user([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], user, 3).tolist() == [[2.0, 0.0, 5.0], [1.0, 0.0, 2.0]]


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match="one size"):
        resample({"a": [1.0, 2.0], "b": [1.0]})


def test_the_influence_on_the_auc_is_what_a_little_weight_changes():
    rng = np.random.default_rng(5)
    label, score = (rng.random(60) < 0.4).astype(float), rng.integers(0, 12, 60) / 12
    influence = auc_influence(label, score)
    assert influence.sum() == pytest.approx(0, abs=1e-12)

    def weighted(weight):
        pairs = weight[label == 1][:, None] * weight[label == 0][None]
        ahead = np.sign(score[label == 1][:, None] - score[label == 0][None]) / 2 + 0.5
        return float((pairs * ahead).sum() / pairs.sum())

    assert weighted(np.ones(60)) == pytest.approx(auc(label, score))
    for row in range(0, 60, 7):
        weight = np.ones(60)
        weight[row] += 1e-5
        assert (weighted(weight) - auc(label, score)) / 1e-5 == pytest.approx(influence[row], abs=1e-5)
    assert np.isnan(auc_influence([1, 1], [0.2, 0.3])).all()
