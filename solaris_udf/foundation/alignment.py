"""Turning a new model's space onto an old one's, so that what reads the vectors meets no strange space at a rollout.

Orthogonal Procrustes (Schönemann 1966): the rotation or reflection R that minimizes |new R - old|. Lengths and angles
within the new space stay as they are, so neighbours and cosines do too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from solaris_udf.foundation.model import Inputs, Model, State
from solaris_udf.foundation.users import Array


@dataclass(frozen=True)
class Fit:
    """rotation float32 [d, d]; error: |new R - old| / |old| over all pairs (0: alike, about 1.4: unrelated), and what
    it is without the rotation."""

    rotation: Array
    error: float
    error_before: float


def fit_rotation(new: Array, old: Array) -> Fit:
    """The orthogonal R that turns rows of new [n, d] onto rows of old [n, d]. Raises ValueError unless shapes agree."""
    if new.ndim != 2 or new.shape != old.shape:
        raise ValueError(f"the vectors of both versions must be [n, d] of one shape, not {new.shape} and {old.shape}")
    new, old = new.astype(np.float64), old.astype(np.float64)
    left, _, right = np.linalg.svd(new.T @ old)
    rotation = left @ right
    size = max(float(np.linalg.norm(old)), np.finfo(np.float64).tiny)
    before, after = (float(np.linalg.norm(each - old)) / size for each in (new, new @ rotation))
    return Fit(rotation.astype(np.float32), after, before)


def rotated(model: Model, rotation: Array) -> Model:
    """The model with its embeddings turned. One of a length that the rotation does not have is left to be refused."""

    def start_pairs(state: State, user_index: Array, items: Inputs) -> Callable[[], tuple[Array, ...]]:
        wait = model.start_pairs(state, user_index, items)

        def turned() -> tuple[Array, ...]:
            embedding, *more = wait()
            fits = embedding.ndim == 2 and embedding.shape[1] == len(rotation)
            return (embedding @ rotation if fits else embedding, *more)

        return turned

    return replace(model, start_pairs=start_pairs)
