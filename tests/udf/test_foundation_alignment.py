"""A new space is turned onto the old one: known rotations come back, lengths and angles stay."""

import numpy as np
import pytest

from solaris_udf.foundation.alignment import fit_rotation, rotated
from tests.udf.test_foundation_inference import Fake


def test_a_known_rotation_is_found_also_under_noise():
    draw = np.random.default_rng(0)
    truth = np.linalg.qr(draw.standard_normal((16, 16)))[0]
    new = draw.standard_normal((500, 16)).astype(np.float32)
    exact = fit_rotation(new, (new @ truth).astype(np.float32))
    assert exact.rotation == pytest.approx(truth, abs=1e-5) and exact.error < 1e-6 < 1 < exact.error_before
    noisy = fit_rotation(new, (new @ truth + 0.1 * draw.standard_normal(new.shape)).astype(np.float32))
    assert noisy.rotation == pytest.approx(truth, abs=0.03) and noisy.error == pytest.approx(0.0995, abs=0.005)
    assert noisy.rotation @ noisy.rotation.T == pytest.approx(np.eye(16), abs=1e-5)


def test_a_reflection_by_hand_and_shapes_that_do_not_agree():
    fit = fit_rotation(np.array([[1.0], [2.0]]), np.array([[-1.0], [-2.0]]))
    assert fit.rotation.tolist() == [[-1.0]] and fit.error == 0 and fit.error_before == 2
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        fit_rotation(np.zeros((2, 3)), np.zeros((2, 4)))


def test_a_turned_model_turns_embeddings_and_leaves_logits_and_wrong_lengths():
    turn = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1]], dtype=np.float32)
    index, given = np.array([0]), {"item_id": np.array([5])}
    for embedding, expected in (([[2, 5, 1]], [[-5, 2, 1]]), ([[2, 5]], [[2, 5]])):
        model = rotated(Fake(embed=lambda *_, value=embedding: np.array(value)).model(), turn)
        found, logits = model.start_pairs({"clicked_mask": np.zeros((1, 8))}, index, given)()
        assert found.tolist() == expected and logits.tolist() == [[0.0]]
