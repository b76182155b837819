"""What a lookup returns."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solaris_udf.tiers import names_of


@dataclass(frozen=True)
class Lookup:
    """The answers to n keys, in the order of the keys.

    embedding float32 [n, d], zeros for tier none; tier uint8 [n] (codes of solaris_udf.tiers); age_seconds int32 [n],
    -1 for none; similarity float32 [n]: 1 for the user's own vector, the cosine for a neighbour's, 0 for none.
    The user_ fields are the same for the best user-level vector (user_mean, neighbor_mean, cold) whatever the pair had;
    user_embedding is [n, 0] if the lookup was asked for without it.
    """

    embedding: npt.NDArray[np.float32]
    tier: npt.NDArray[np.uint8]
    age_seconds: npt.NDArray[np.int32]
    similarity: npt.NDArray[np.float32]
    user_embedding: npt.NDArray[np.float32]
    user_tier: npt.NDArray[np.uint8]
    user_age_seconds: npt.NDArray[np.int32]
    user_similarity: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tier)

    @property
    def tier_names(self) -> list[str]:
        return names_of(self.tier)

    @classmethod
    def room(cls, count: int, dim: int, user_dim: int) -> "Lookup":
        """Room for count answers, not filled."""
        return cls(
            np.empty((count, dim), np.float32),
            np.empty(count, np.uint8),
            np.empty(count, np.int32),
            np.empty(count, np.float32),
            np.empty((count, user_dim), np.float32),
            np.empty(count, np.uint8),
            np.empty(count, np.int32),
            np.empty(count, np.float32),
        )

    @classmethod
    def empty(cls, count: int, dim: int, user_dim: int) -> "Lookup":
        """count answers of tier none."""
        found = cls.room(count, dim, user_dim)
        for name in cls.__dataclass_fields__:
            getattr(found, name).fill(-1 if name.endswith("age_seconds") else 0)
        return found

    def part(self, keys: slice) -> "Lookup":
        """The answers to some keys, as views."""
        return Lookup(*(getattr(self, name)[keys] for name in self.__dataclass_fields__))
