"""The tiers of the serving hierarchy: their codes and names, and the policy that says which of them answers.

Only the reader resolves (solaris_udf/snapshot/answer.py); the coverage audit and the training-row join ask it, so what
is measured is what is served.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NONE, PAIR, USER_MEAN, NEIGHBOR_PAIR, NEIGHBOR_MEAN, COLD = range(6)
TIER_NAMES = ("none", "pair", "user_mean", "neighbor_pair", "neighbor_mean", "cold")
TIER_CODES = {name: code for code, name in enumerate(TIER_NAMES)}
PAIR_TIERS = (PAIR, NEIGHBOR_PAIR)  # vectors of a (user, item) pair
USER_TIERS = (USER_MEAN, NEIGHBOR_MEAN, COLD)  # vectors of a user, whatever the item

NEVER = 255  # the rank of a tier that is not in the order

MICROS_PER_SECOND = 1_000_000
MICROS_PER_HOUR = 3_600_000_000

Codes = npt.NDArray[np.uint8]


def names_of(codes: npt.ArrayLike) -> list[str]:
    """The tier names of codes [n]."""
    return [TIER_NAMES[code] for code in np.asarray(codes, dtype=np.uint8).tolist()]


@dataclass(frozen=True)
class TierPolicy:
    """Which tiers may answer, in which order, and how old or dissimilar a vector may be.

    order: tier names, first choice first; a tier that is not named never answers. Ages are in microseconds: a vector is
    served while 0 <= age < limit, so one of exactly the limit's age is not. A vector computed after the time of the
    request is not served either.
    """

    order: tuple[str, ...]
    ttl_micros: int
    max_user_age_micros: int
    min_similarity: float = 0.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.order if name not in TIER_NAMES[1:]]
        if unknown:
            raise ValueError(f"unknown tiers {unknown}; tiers: {', '.join(TIER_NAMES[1:])}")
        if len(set(self.order)) != len(self.order):
            raise ValueError(f"the tier order names one twice: {list(self.order)}")
        if self.ttl_micros <= 0 or self.max_user_age_micros <= 0:
            raise ValueError("the age limits of the tiers must be positive")
        if not -1 <= self.min_similarity <= 1:
            raise ValueError(f"min_similarity is {self.min_similarity}, must be in [-1, 1]")

    @classmethod
    def of_hours(
        cls, order: Iterable[str], ttl_hours: float, max_user_age_hours: float, min_similarity: float
    ) -> "TierPolicy":
        """From the [serving] section's figures."""
        ttl, max_user_age = round(ttl_hours * MICROS_PER_HOUR), round(max_user_age_hours * MICROS_PER_HOUR)
        return cls(tuple(order), ttl, max_user_age, min_similarity)

    @property
    def codes(self) -> tuple[int, ...]:
        return tuple(TIER_CODES[name] for name in self.order)

    @property
    def ranks(self) -> Codes:
        """Each tier code's place in the order, NEVER where it is not in it. uint8 [6]."""
        ranks = np.full(len(TIER_NAMES), NEVER, np.uint8)
        ranks[list(self.codes)] = range(len(self.order))
        return ranks

    @property
    def codes_of_ranks(self) -> Codes:
        """The inverse of ranks, NONE for NEVER. uint8 [256]."""
        codes = np.full(NEVER + 1, NONE, np.uint8)
        codes[: len(self.order)] = self.codes
        return codes
