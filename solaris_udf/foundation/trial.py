"""Made-up inputs of the right names, shapes and dtypes: what export traces with and what a model check feeds."""

from collections.abc import Mapping, Sequence

import numpy as np

from solaris_udf.foundation.features import SEQUENCES, Feature
from solaris_udf.foundation.users import Array


def trial_users(
    inputs: Sequence[Feature], count: int, lengths: Mapping[str, int], seed: int = 0, empty: Sequence[int] = ()
) -> dict[str, Array]:
    """User inputs of `count` users with sequences padded to `lengths`. User u has a full sequence if u is even, half a
    one if it is odd, none if it is in `empty`."""
    random = np.random.default_rng(seed)
    masks: dict[str, Array] = {}
    for sequence in SEQUENCES:
        width = lengths[sequence]
        filled = np.array([0 if user in empty else width if user % 2 == 0 else width // 2 for user in range(count)])
        masks[sequence] = np.arange(width) < filled[:, None]
    out: dict[str, Array] = {}
    for feature in inputs:
        of = feature.sequence
        if feature.name == "user_id":
            out[feature.name] = np.arange(1, count + 1, dtype=np.int64)
        elif feature.name == "user_counts":
            out[feature.name] = np.log1p(random.integers(0, 100, (count, 4))).astype(np.float32)
        elif of and feature.side == "user":
            mask = masks[of]
            if feature.name == f"{of}_mask":
                out[feature.name] = mask
            elif feature.dtype == "bool":
                out[feature.name] = mask & (random.random(mask.shape) < 0.2)
            elif feature.dtype == "float32":
                ages = np.sort(random.random(mask.shape) * 72, axis=1)[:, ::-1]
                out[feature.name] = np.where(mask, ages, 0).astype(np.float32)
            else:
                out[feature.name] = np.where(mask, random.integers(1, 1000, mask.shape), 0)
    return out


def trial_items(inputs: Sequence[Feature], count: int, dense: int, seed: int = 0) -> dict[str, Array]:
    """Item inputs of `count` pairs."""
    random = np.random.default_rng(seed + 1)
    out: dict[str, Array] = {}
    for feature in inputs:
        if feature.side != "item":
            continue
        if feature.name == "item_dense":
            out[feature.name] = random.standard_normal((count, dense)).astype(np.float32)
        elif feature.dtype == "float32":
            out[feature.name] = (random.random(count) * 500).astype(np.float32)
        else:
            out[feature.name] = random.integers(1, 1000, count)
    return out
