"""A lookup as a dense feature block for an online ranking model.

Every vector comes with a presence flag, its tier one-hot, its age and its similarity, so a zero vector is never
ambiguous. With two slots (the default) pair vectors and user-level vectors have columns of their own: the two mean
different things, and a user-level vector is worth most where the model crosses it with the item (a product, DCN or
bilinear layer). With one slot there is the resolved vector only.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.tiers import NONE, PAIR_TIERS, TIER_NAMES, USER_TIERS

Slots = Literal["one", "two"]
Float32 = npt.NDArray[np.float32]
_ALL = (*PAIR_TIERS, *USER_TIERS)


def feature_names(dim: int, slots: Slots = "two") -> list[str]:
    """The columns of feature_block, in order, for vectors of dim dimensions."""
    if slots == "one":
        return _slot_names("served", dim, _ALL)
    return _slot_names("pair", dim, PAIR_TIERS) + _slot_names("user", dim, USER_TIERS)


def feature_block(lookup: Lookup, slots: Slots = "two") -> Float32:
    """float32 [n, F] with the columns of feature_names.

    A slot is: the vector (d columns, zeros if absent), present (0 or 1), a one-hot of its tiers, log1p of the age in
    hours, and the similarity; all zero if absent. Raises ValueError for two slots of a lookup without user vectors.
    """
    if slots == "one":
        return _slot(lookup.embedding, lookup.tier, lookup.age_seconds, lookup.similarity, _ALL)
    if lookup.user_embedding.shape[1] != lookup.embedding.shape[1]:
        raise ValueError("the lookup has no user vectors; look up with user_vectors=True or use slots='one'")
    pair = np.where(np.isin(lookup.tier, PAIR_TIERS), lookup.tier, np.uint8(NONE))
    return np.concatenate(
        [
            _slot(lookup.embedding, pair, lookup.age_seconds, lookup.similarity, PAIR_TIERS),
            _slot(lookup.user_embedding, lookup.user_tier, lookup.user_age_seconds, lookup.user_similarity, USER_TIERS),
        ],
        axis=1,
    )


def _slot_names(slot: str, dim: int, tiers: tuple[int, ...]) -> list[str]:
    return [
        *(f"{slot}_{index}" for index in range(dim)),
        f"{slot}_present",
        *(f"{slot}_is_{TIER_NAMES[tier]}" for tier in tiers),
        f"{slot}_log_age",
        f"{slot}_similarity",
    ]


def _slot(
    vectors: Float32,
    tier: npt.NDArray[np.uint8],
    age: npt.NDArray[np.int32],
    similarity: Float32,
    tiers: tuple[int, ...],
) -> Float32:
    dim = vectors.shape[1]
    block = np.zeros((len(vectors), dim + len(tiers) + 3), np.float32)
    present = tier != NONE
    block[:, :dim] = np.where(present[:, None], vectors, 0)
    block[:, dim] = present
    block[:, dim + 1 : dim + 1 + len(tiers)] = tier[:, None] == np.asarray(tiers, np.uint8)
    block[:, -2] = np.where(present, np.log1p(np.maximum(age, 0) / 3600), 0)
    block[:, -1] = np.where(present, similarity, 0)
    return block
