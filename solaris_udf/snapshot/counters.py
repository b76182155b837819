"""Counting what was served."""

import threading

import numpy as np
import numpy.typing as npt

from solaris_udf.tiers import TIER_NAMES


class TierCounters:
    """How many keys each tier has answered, counted by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = np.zeros(len(TIER_NAMES), np.int64)

    def add(self, tiers: npt.NDArray[np.uint8]) -> None:
        counts = np.bincount(tiers, minlength=len(TIER_NAMES))
        with self._lock:
            self._counts += counts

    def read(self) -> dict[str, int]:
        """Keys by tier name since the start; none is the misses."""
        with self._lock:
            return dict(zip(TIER_NAMES, self._counts.tolist(), strict=True))
