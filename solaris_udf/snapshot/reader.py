"""The lookup: from (user, item, time) to a vector, its tier, age and similarity. numpy and pyarrow only."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.answer import Tables, answer
from solaris_udf.snapshot.counters import TierCounters
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.hashing import hash_users, shard_of
from solaris_udf.snapshot.inputs import as_ids, as_micros
from solaris_udf.snapshot.layout import CURRENT, PAIRS, USERS
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.mapped import MappedTable
from solaris_udf.snapshot.miss_log import MissLog
from solaris_udf.snapshot.opening import check_files, find_snapshot
from solaris_udf.snapshot.storage import LocalStorage

Int64 = npt.NDArray[np.int64]
Verify = Literal["none", "manifest", "full"]
Engine = Literal["auto", "numpy", "numba"]
# Keys handled at a time: the working arrays stay in the cache, and a batch of any size needs little beside its answer.
CHUNK = 8192


class Snapshot:
    """One opened snapshot: immutable, memory-mapped, for any number of threads. `Snapshot.open` makes one."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        shards: Iterable[int],
        counters: TierCounters | None = None,
        engine: Engine = "numpy",
        misses: MissLog | None = None,
    ) -> None:
        """Maps the files of the given shards. Prefer `Snapshot.open`, which also finds and verifies the folder.

        pairs and users are the mapped tables by shard.
        """
        self.folder, self.manifest = folder, manifest
        self.shards = tuple(sorted(set(shards)))
        self.counters, self.misses = counters or TierCounters(), misses
        self.pairs = {shard: MappedTable.open(folder, manifest, PAIRS, shard) for shard in self.shards}
        self.users = {shard: MappedTable.open(folder, manifest, USERS, shard) for shard in self.shards}
        self.tables = Tables(manifest, {PAIRS: self.pairs, USERS: self.users})
        self._answer = answer_with(engine, self.tables)

    @classmethod
    def open(
        cls,
        path: str | Path,
        shards: Iterable[int] | None = None,
        pin: str | None = None,
        verify: Verify = "manifest",
        counters: TierCounters | None = None,
        engine: Engine = "auto",
        misses: MissLog | None = None,
    ) -> "Snapshot":
        """Opens the live snapshot of a snapshots folder, a pinned one of it, or one snapshot's own folder.

        shards: the shards to hold (see `shard_of`); None is all. pin: a snapshot id to open in place of the live one.
        verify: `manifest` checks the manifest against its own hash and each file's size and columns; `full` also the
        sha256 of every held file, which reads them all; `none` does not look at file sizes. engine: what answers
        lookups, compiled code (`numba`) or `numpy`; both give the same; `auto` is numba if it is installed. The first
        snapshot of a process that numba answers takes seconds to open, a fraction of one once numba's cache is filled.
        misses: where keys that no pair's own vector answered are noted, if anywhere.

        Raises SnapshotError, one line, for whatever is missing, damaged or of another format.
        """
        if verify not in ("none", "manifest", "full"):
            raise SnapshotError(f"verify is {verify!r}, must be none, manifest or full")
        if engine not in ("auto", "numpy", "numba"):
            raise SnapshotError(f"engine is {engine!r}, must be auto, numpy or numba")
        storage = LocalStorage(path)
        while True:
            live = storage.read_text(CURRENT)
            try:
                return cls._open(Path(path), shards, pin, verify, counters, engine, misses)
            except SnapshotError:
                # The live snapshot may have moved on, and been removed, between the two steps: take the new one.
                if pin is not None or storage.read_text(CURRENT) == live:
                    raise

    @classmethod
    def _open(
        cls,
        path: Path,
        shards: Iterable[int] | None,
        pin: str | None,
        verify: Verify,
        counters: TierCounters | None,
        engine: Engine,
        misses: MissLog | None,
    ) -> "Snapshot":
        folder, manifest = find_snapshot(path, pin)
        held = list(range(manifest.shards)) if shards is None else sorted({int(shard) for shard in shards})
        for shard in held:
            if not 0 <= shard < manifest.shards:
                raise SnapshotError(f"there is no shard {shard}: {folder.name} has shards 0 to {manifest.shards - 1}")
        if verify != "none":
            check_files(folder, manifest, held, hashes=verify == "full")
        return cls(folder, manifest, held, counters, engine, misses)

    @property
    def snapshot_id(self) -> str:
        return self.manifest.snapshot_id

    @property
    def dim(self) -> int:
        return self.manifest.dim

    def shard_of(self, user_ids: Any) -> Int64:
        """The shard that holds each user, for routing requests to hosts. int64 [n]."""
        return shard_of(hash_users(as_ids(user_ids, "user_ids")), self.manifest.shards)

    def lookup(self, user_ids: Any, item_ids: Any, at: Any = None, *, user_vectors: bool = True) -> Lookup:
        """The vectors of n (user, item) pairs as of the time of the request.

        user_ids, item_ids: integers [n]. at: one time or one a key (int64 microseconds UTC, datetime64, or a datetime
        with a zone); it decides ages and expiry; now by default. user_vectors=False leaves user_embedding [n, 0].

        Raises SnapshotError for arrays of unequal length, ids that are no 64-bit integers, times that are none, and
        users whose shard is not held. A neighbour whose shard is not held answers nothing.
        """
        users, items = as_ids(user_ids, "user_ids"), as_ids(item_ids, "item_ids")
        if len(users) != len(items):
            raise SnapshotError(f"user_ids has {len(users)} keys and item_ids {len(items)}; they must be of one length")
        times = as_micros(at, len(users))
        if len(self.shards) < self.manifest.shards:
            self._check_held(users)
        found = Lookup.room(len(users), self.dim, self.dim if user_vectors else 0)
        for start in range(0, len(users), CHUNK):
            chunk = slice(start, start + CHUNK)
            self._answer(users[chunk], items[chunk], times[chunk], found.part(chunk))
        self.counters.add(found.tier)
        if self.misses is not None:
            self.misses.add(users, items, times, found)
        return found

    def _check_held(self, users: Int64) -> None:
        shard = self.shard_of(users)
        missing = ~self.tables.held[shard]
        if missing.any():
            foreign = np.unique(shard[missing]).tolist()
            raise SnapshotError(
                f"{int(missing.sum())} keys are of shards {foreign[:8]}, which this reader does not hold "
                f"(it holds {list(self.shards)[:8]}); route by shard_of"
            )


def answer_with(engine: Engine, tables: Tables) -> Callable[[Int64, Int64, Int64, Lookup], None]:
    """The function that answers keys from these tables. Raises SnapshotError if numba is asked for and not there."""
    if engine != "numpy":
        try:
            from solaris_udf.snapshot.compiled import Compiled
        except ImportError as error:
            if engine == "numba":
                raise SnapshotError(f"engine 'numba' can't be used: {error}; pip install numba") from None
        else:
            compiled = Compiled(tables).answer
            nothing = np.zeros(0, np.int64)
            for dim in (0, tables.manifest.dim):  # compiled now, not during the first lookup
                compiled(nothing, nothing, nothing, Lookup.room(0, tables.manifest.dim, dim))
            return compiled
    return partial(answer, tables)
