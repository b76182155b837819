import numpy as np
import pytest

from solaris_udf.metrics import auc, calibration, log_loss, normalized_entropy
from solaris_udf.uplift import figures


def made(count=4000, seed=0):
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=count) - 1.5
    truth = 1 / (1 + np.exp(-logit))
    return (rng.random(count) < truth).astype(float), rng.integers(0, 200, count), truth


def table(found):
    return {(figure.model, figure.feature_set, figure.seed, figure.metric): figure for figure in found}


def test_figures_are_the_metrics_of_the_rows_and_ratios_are_of_the_gap():
    label, user, truth = made()
    base = np.stack([np.full(len(label), 0.2), np.full(len(label), 0.25)])
    half = np.stack([0.5 * truth + 0.5 * row for row in base])
    predictions = {("vm", "base"): base, ("vm", "embeddings"): half, ("fm", "slice_start"): truth[None]}
    found = table(figures(label, user, predictions, [3, 4], replicates=300))
    assert found["vm", "embeddings", 3, "log_loss"].value == pytest.approx(log_loss(label, half[0]))
    assert found["vm", "embeddings", 4, "auc"].value == pytest.approx(auc(label, half[1]))
    assert found["vm", "base", 4, "calibration"].value == pytest.approx(calibration(label, base[1]))
    assert found["vm", "base", 3, "ne"].value == pytest.approx(normalized_entropy(label, base[0]))
    losses = {name: np.mean([log_loss(label, p) for p in rows]) for name, rows in (("base", base), ("half", half))}
    assert found["vm", "embeddings", -1, "rll"].value == pytest.approx(100 * (losses["half"] / losses["base"] - 1))
    gap = losses["base"] - log_loss(label, truth)
    ratio = found["vm", "embeddings", -1, "transfer_ratio"]
    assert ratio.value == pytest.approx((losses["base"] - losses["half"]) / gap)
    assert ratio.ci_low < ratio.value < ratio.ci_high
    rll = found["vm", "embeddings", -1, "rll"]
    assert rll.ci_low < rll.value < rll.ci_high < 0
    area = found["vm", "embeddings", -1, "auc"]
    assert area.value == pytest.approx(np.mean([auc(label, row) for row in half]))
    # Rows are independent here, so the interval is that of Hanley and McNeil's standard error, about.
    positives, negatives = label.sum(), (1 - label).sum()
    q1, q2 = area.value / (2 - area.value), 2 * area.value**2 / (1 + area.value)
    variance = area.value * (1 - area.value) + (positives - 1) * (q1 - area.value**2)
    error = np.sqrt((variance + (negatives - 1) * (q2 - area.value**2)) / (positives * negatives))
    assert (area.ci_high - area.ci_low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.25)
    assert ("vm", "embeddings", -1, "transfer_ratio_fresh") not in found
    assert ("vm", "base", -1, "rll") not in found and ("fm", "slice_start", 3, "ne") not in found


def test_each_ceiling_has_a_ratio_of_its_own():
    label, user, truth = made()
    base = np.full((1, len(label)), 0.2)
    half = 0.5 * truth[None] + 0.5 * base
    predictions = {
        ("vm", "base"): base,
        ("vm", "embeddings"): half,
        ("fm", "slice_start"): half,
        ("fm", "fresh"): truth[None],
    }
    found = table(figures(label, user, predictions, [0], replicates=100))
    ratio = found["vm", "embeddings", -1, "transfer_ratio"]
    assert (ratio.value, ratio.ci_low, ratio.ci_high) == (1.0, 1.0, 1.0)
    losses = [log_loss(label, p) for p in (base[0], half[0], truth)]
    fresh = found["vm", "embeddings", -1, "transfer_ratio_fresh"]
    assert fresh.value == pytest.approx((losses[0] - losses[1]) / (losses[0] - losses[2]))


def test_a_ratio_to_an_advantage_that_may_be_none_is_explained_and_not_stated():
    label, user, truth = made(400)
    noise = np.clip(truth + 0.001 * np.random.default_rng(1).normal(size=400), 0.01, 0.99)
    found = table(
        figures(
            label,
            user,
            {("vm", "base"): truth[None], ("vm", "embeddings"): noise[None], ("fm", "slice_start"): noise[None]},
            [0],
            replicates=200,
        )
    )
    ratio = found["vm", "embeddings", -1, "transfer_ratio"]
    assert ratio.value is None and "not surely above 0" in ratio.note
    without = table(figures(label, user, {("vm", "base"): truth[None], ("vm", "embeddings"): noise[None]}, [0], 50))
    assert "no foundation model" in without["vm", "embeddings", -1, "transfer_ratio"].note


def test_rows_of_one_class_have_no_normalized_entropy():
    found = table(figures([0, 0, 0], np.array([0, 1, 1]), {("vm", "base"): np.full((1, 3), 0.1)}, [0], 50))
    assert found["vm", "base", -1, "ne"].value is None and found["vm", "base", -1, "auc"].value is None
    assert found["vm", "base", -1, "log_loss"].value == pytest.approx(-np.log(0.9))
