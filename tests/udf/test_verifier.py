import json

import numpy as np
import pytest

from solaris_udf.calibration import IDENTITY, Isotonic, fit_isotonic
from solaris_udf.verifier import DESCRIPTION, WEIGHTS, Verifier, VerifierError, load, prepare, save
from solaris_udf.verifier_training import Training, captured, train

FEATURES = ("often", "age", "noise")


def synthetic(count: int, seed: int = 0):
    """Pairs whose rows are Poisson with a rate that two features decide."""
    draw = np.random.default_rng(seed)
    values = np.column_stack([draw.exponential(2, count), draw.uniform(0, 48, count), draw.normal(size=count)])
    rate = 0.4 * np.log1p(values[:, 0]) * np.exp(-values[:, 1] / 12)
    return values, draw.poisson(rate).astype(float), rate


@pytest.fixture(scope="module")
def trained() -> Verifier:
    values, rows, _ = synthetic(30_000)
    return train(
        values, rows, np.arange(30_000) >= 22_000, FEATURES, 6.0, Training(hidden=(16,), epochs=12, patience=3)
    )


@pytest.mark.parametrize("hidden", [(), (16,)])
def test_both_outputs_are_calibrated_and_rank_like_the_truth(hidden):
    values, rows, _ = synthetic(60_000)
    verifier = train(
        values, rows, np.arange(60_000) >= 20_000, FEATURES, 6.0, Training(hidden=hidden, epochs=12, patience=3)
    )
    fresh, happened, rate = synthetic(40_000, seed=1)
    probability, expected = verifier.predict(fresh)
    assert (expected >= probability).all() and (probability >= 0).all() and (probability <= 1).all()
    # 40,000 validation rows hold about 3,600 scored ones: their own deviation is 1.7%.
    assert expected.sum() == pytest.approx(rate.sum(), rel=0.05)
    assert probability.sum() == pytest.approx((1 - np.exp(-rate)).sum(), rel=0.05)
    for part in np.array_split(np.argsort(probability), 10)[5:]:
        assert probability[part].mean() == pytest.approx((1 - np.exp(-rate[part])).mean(), rel=0.25)
    # The best tenth by the true rate is the most that any ranking can be expected to hold.
    assert captured(expected, happened, 0.1) >= 0.9 * captured(rate, happened, 0.1)


def test_training_is_reproducible_and_seeded(trained):
    values, rows, _ = synthetic(30_000)
    later = np.arange(30_000) >= 22_000
    again = train(values, rows, later, FEATURES, 6.0, Training(hidden=(16,), epochs=12, patience=3))
    other = train(values, rows, later, FEATURES, 6.0, Training(hidden=(16,), epochs=12, patience=3, seed=8))
    np.testing.assert_array_equal(again.predict(values[:100])[0], trained.predict(values[:100])[0])
    assert (other.predict(values[:100])[0] != trained.predict(values[:100])[0]).any()


@pytest.mark.parametrize("rows", [np.zeros(100), np.ones(100)])
def test_one_class_can_not_be_trained_on(rows):
    with pytest.raises(ValueError, match="scored and pairs that were not"):
        train(np.zeros((100, 3)), rows, np.arange(100) >= 50, FEATURES, 6.0, Training())


def test_a_prediction_worked_out_by_hand():
    # log1p(e - 1) = 1, scaled (1 - 0.5) / 0.5 = 1; hidden = relu(2 * 1 - 1) = 1; outputs 0 and ln(e - 1).
    verifier = Verifier(
        ("often",),
        6.0,
        np.array([0.5]),
        np.array([0.5]),
        ((np.array([[2.0]]), np.array([-1.0])), (np.array([[1.0], [0.0]]), np.array([-1.0, np.log(np.e - 1)]))),
        Isotonic((0.0, 0.5, 1.0), (0.0, 0.2, 1.0)),
        excess=0.5,
    )
    probability, expected = verifier.predict(np.array([[np.e - 1]]))
    assert probability[0] == pytest.approx(0.2)  # sigmoid(0) = 0.5, calibrated to 0.2
    assert expected[0] == pytest.approx(0.2 * (1 + 0.5 * 1.0))  # softplus(ln(e - 1)) = 1
    assert prepare([[-1.0, 0.0, 1.0]]).tolist() == [[-np.log(2), 0.0, np.log(2)]]


def test_scores_do_not_depend_on_the_batch(trained):
    values, _, _ = synthetic(5_000, seed=2)
    whole = trained.predict(values)[1]
    parts = np.concatenate([trained.predict(part)[1] for part in np.array_split(values, 37)])
    np.testing.assert_array_equal(whole, parts)
    assert trained.predict(np.zeros((0, 3)))[0].shape == (0,)


def test_a_saved_model_comes_back_the_same(trained, tmp_path):
    save(trained, tmp_path / "model", {"run_id": "r1"})
    found = load(tmp_path / "model")
    values, _, _ = synthetic(500, seed=3)
    np.testing.assert_array_equal(found.predict(values), trained.predict(values))
    assert found.features == FEATURES and found.metrics == trained.metrics
    assert json.loads((tmp_path / "model" / DESCRIPTION).read_text())["run_id"] == "r1"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [DESCRIPTION, WEIGHTS]


def test_a_broken_folder_is_refused(trained, tmp_path):
    with pytest.raises(VerifierError, match="can't be read"):
        load(tmp_path)
    save(trained, tmp_path)
    weights = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(VerifierError, match="sha256 differs"):
        load(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(weights)
    content = json.loads((tmp_path / DESCRIPTION).read_text())
    for fault, message in (
        ({"format": 2}, "format 2"),
        ({"layers": 7}, "incomplete"),
        ({"calibration": {}}, "incomplete"),
    ):
        (tmp_path / DESCRIPTION).write_text(json.dumps({**content, **fault}))
        with pytest.raises(VerifierError, match=message):
            load(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{")
    with pytest.raises(VerifierError, match="can't be read"):
        load(tmp_path)


def test_features_that_do_not_match_are_named(trained):
    trained.check(FEATURES, 6.0)
    with pytest.raises(VerifierError, match="noise is not computed; taste is unknown to it") as error:
        trained.check(("often", "age", "taste"), 3.0)
    assert "its window is 6.0 h, not 3.0 h" in str(error.value) and "train_verifier" in str(error.value)
    with pytest.raises(VerifierError, match="order differs"):
        trained.check(("age", "often", "noise"), 6.0)
    with pytest.raises(VerifierError, match=r"must be \[n, 3\]"):
        trained.predict(np.zeros((2, 4)))
    with pytest.raises(VerifierError, match="not finite: age"):
        trained.predict(np.array([[0.0, np.nan, 0.0]]))


def test_isotonic_pools_what_violates_the_order():
    probability = np.repeat([0.1, 0.2, 0.3, 0.4], 20)
    label = np.repeat([0.0, 1.0, 0.0, 1.0], 20)
    # 0.2 and 0.3 violate and pool: mean prediction 0.25, mean label 0.5.
    table = fit_isotonic(probability, label, bins=4)
    assert table.x == pytest.approx((0.0, 0.1, 0.25, 0.4, 1.0)) and table.y == (0.0, 0.0, 0.5, 1.0, 1.0)
    assert fit_isotonic(np.array([]), np.array([])) == IDENTITY
    assert fit_isotonic(np.array([0.1, 0.2]), np.array([1.0, 1.0])) == IDENTITY


@pytest.mark.parametrize(
    "x, y",
    [
        ((0.0,), (0.0,)),
        ((0.0, 0.5, 0.5, 1.0), (0, 0, 1, 1)),
        ((0.0, 1.0), (1.0, 0.0)),
        ((0.1, 1.0), (0.0, 1.0)),
        ((0.0, 1.0), (0.0, 1.5)),
    ],
)
def test_a_table_that_is_no_calibration_is_refused(x, y):
    with pytest.raises(ValueError, match="calibration table"):
        Isotonic(x, y)
