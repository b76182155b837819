"""A sample of what lookups did not find, for the next refresh: predict_pairs reads it as the source lookup_misses.

The ranking log holds what was scored, so the source `misses` already sees most of it. This log is for fleets that look
up more than they log, or that want their misses before their ranking log arrives.
"""

import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.tiers import PAIR

Int64 = npt.NDArray[np.int64]
MICROS_PER_DAY = 86_400_000_000
SCHEMA = pa.schema(
    [
        ("user_id", pa.int64()),
        ("item_id", pa.int64()),
        ("missed_at", pa.timestamp("us", "UTC")),
        ("tier", pa.uint8()),
        ("weight", pa.float64()),
    ]
)


@dataclass
class MissLog:
    """Keeps a random part of the keys that no pair's own embedding answered, and writes them as Parquet files.

    folder: files go to folder/day=YYYY-MM-DD/, the (UTC) day of the request. Whoever owns the folder deletes old days.
    share: of the misses that is kept; each stands for weight = 1 / share of them. capacity: misses kept between two
    flushes; more are counted in `dropped`, so a lookup never waits for a disk and memory stays bounded.

    `add` is for any number of threads and costs a lookup some nanoseconds a key. A SnapshotFollower flushes at every
    poll; whoever opens a Snapshot alone calls `flush`. Raises SnapshotError for a share outside (0, 1].
    """

    folder: str | Path
    share: float = 0.01
    capacity: int = 100_000
    dropped: int = 0
    _parts: list[tuple[Int64, Int64, Int64, npt.NDArray[np.uint8]]] = field(default_factory=list)
    _kept: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SnapshotError(f"share is {self.share}, must be above 0 and at most 1")
        if self.capacity < 1:
            raise SnapshotError(f"capacity is {self.capacity}, must be at least 1")
        self._lock = threading.Lock()
        self._draw = np.random.default_rng()

    def add(self, user_ids: Int64, item_ids: Int64, at: Int64, found: Lookup) -> None:
        """Notes the misses among n answered keys; ids and times (microseconds UTC) int64 [n]."""
        missed = np.flatnonzero(found.tier != PAIR)
        with self._lock:
            if self.share < 1:
                missed = missed[self._draw.random(len(missed)) < self.share]
            room = self.capacity - self._kept
            self.dropped += max(0, len(missed) - room)
            missed = missed[:room]
            if len(missed):
                self._parts.append((user_ids[missed], item_ids[missed], at[missed], found.tier[missed]))
                self._kept += len(missed)

    def flush(self) -> int:
        """Writes what was noted since the last flush and returns how many misses that was.

        A file is complete when it has its name. Raises OSError if the disk refuses; the misses are then lost, and
        counted as dropped.
        """
        with self._lock:
            parts, self._parts, self._kept = self._parts, [], 0
        if not parts:
            return 0
        users, items, at, tiers = (np.concatenate(column) for column in zip(*parts, strict=True))
        try:
            days = at // MICROS_PER_DAY
            for day in np.unique(days).tolist():
                self._write(np.datetime64(day, "D").item().isoformat(), users, items, at, tiers, days == day)
        except OSError:
            with self._lock:
                self.dropped += len(users)
            raise
        return len(users)

    def _write(
        self,
        day: str,
        users: Int64,
        items: Int64,
        at: Int64,
        tiers: npt.NDArray[np.uint8],
        chosen: npt.NDArray[np.bool_],
    ) -> None:
        import pyarrow.parquet as pq

        count = int(chosen.sum())
        columns = [users[chosen], items[chosen], at[chosen], tiers[chosen], np.full(count, 1 / self.share)]
        arrays = [pa.array(column).cast(kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
        folder, name = Path(self.folder) / f"day={day}", f"misses-{uuid.uuid4().hex}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.part"  # readers skip names that begin with a dot
        try:
            pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), partial)
            partial.replace(folder / name)
        finally:
            partial.unlink(missing_ok=True)
