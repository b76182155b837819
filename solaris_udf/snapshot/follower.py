"""Following CURRENT: a background thread opens each new snapshot and swaps it in between batches."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from solaris_udf.snapshot.counters import TierCounters
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import LEASES
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.miss_log import MissLog
from solaris_udf.snapshot.publish import read_current
from solaris_udf.snapshot.pull import pull
from solaris_udf.snapshot.reader import Engine, Snapshot, Verify
from solaris_udf.snapshot.storage import LocalStorage

log = logging.getLogger("solaris.snapshot")

LONGEST_RETRY = 60.0  # seconds; after failures polls become rarer up to this: a damaged snapshot is hashed at each
LEASE_SECONDS = 600  # a lease is renewed this often; gc takes one of hours ago for a dead reader's


class SnapshotFollower:
    """Serves lookups from the live snapshot of a folder, whichever that is at the moment.

    Each lookup runs wholly on one snapshot. A new one is opened and verified in the background and then swapped in; the
    old one is unmapped when its last lookup ends. If the new one is bad, the old one goes on serving, `error` says why,
    and later polls try again, each after twice the time up to a minute. Counters run on over swaps. Where the folder
    can be written, a lease (a file below .leases) keeps gc from the snapshot that serves.
    """

    def __init__(
        self,
        root: str | Path,
        poll_seconds: float = 5.0,
        shards: Iterable[int] | None = None,
        verify: Verify = "full",
        on_swap: Callable[[Snapshot], None] | None = None,
        engine: Engine = "auto",
        misses: MissLog | None = None,
        source: str | None = None,
    ) -> None:
        """Opens the live snapshot and starts following. Raises SnapshotError if there is none that can be opened.

        shards, engine, misses: as in Snapshot.open; misses are written at every poll. verify: likewise, but by default
        every byte of the held files is read and checked, of the first snapshot before this returns, of the others in
        the background, while lookups go on. on_swap: called in the background thread with each new snapshot before it
        serves, for example to warm it up; if it raises, the new snapshot is not taken. source: URI of an object store
        that root follows: each look at CURRENT pulls its live snapshot first.
        """
        if poll_seconds <= 0:
            raise SnapshotError(f"poll_seconds is {poll_seconds}, must be positive")
        self._root, self._verify, self._on_swap, self._engine = Path(root), verify, on_swap, engine
        self._shards = None if shards is None else tuple(shards)
        self._poll_seconds, self._misses, self._source = poll_seconds, misses, source
        self.counters = TierCounters()
        self.swaps = 0
        self.error: str | None = None
        self._failures = 0
        self._stop = threading.Event()
        if source is not None:
            pull(source, self._root)
        self._snapshot = self._open()
        self._lease: Path | None = None
        self._lease_until = 0.0
        self._renew_lease()
        self._thread = threading.Thread(target=self._follow, name="snapshot-follower", daemon=True)
        self._thread.start()

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that serves now. Hold it to make several lookups on the same one."""
        return self._snapshot

    def lookup(self, user_ids: Any, item_ids: Any, at: Any = None, *, user_vectors: bool = True) -> Lookup:
        """Snapshot.lookup on the snapshot that serves now."""
        return self._snapshot.lookup(user_ids, item_ids, at, user_vectors=user_vectors)

    def poll(self) -> bool:
        """Looks at CURRENT once; swaps if it names another snapshot that can be opened. Returns whether it swapped.

        The background thread does this every poll_seconds; it never raises.
        """
        try:
            if self._source is not None:
                pull(self._source, self._root)
            if read_current(LocalStorage(self._root)) == self._snapshot.snapshot_id:
                self.error, self._failures = None, 0
                return False
            new = self._open()
            if self._on_swap is not None:
                self._on_swap(new)
        except Exception as error:
            message = str(error) if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"
            if message != self.error:
                log.warning("still serving %s: %s", self._snapshot.snapshot_id, message)
            self.error = message
            self._failures += 1
            return False
        log.info("serving %s after %s", new.snapshot_id, self._snapshot.snapshot_id)
        self._snapshot, self.error, self._failures = new, None, 0
        self.swaps += 1
        self._renew_lease()
        return True

    def wait_seconds(self) -> float:
        """How long the background thread waits for its next poll: poll_seconds, and longer while polls fail."""
        return max(self._poll_seconds, min(LONGEST_RETRY, self._poll_seconds * 2.0 ** min(self._failures, 30)))

    def close(self) -> None:
        """Stops following. Lookups go on working on the last snapshot."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._flush_misses()
        if self._lease is not None:
            with suppress(OSError):
                self._lease.unlink(missing_ok=True)

    def __enter__(self) -> "SnapshotFollower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Snapshot:
        return Snapshot.open(
            self._root,
            self._shards,
            verify=self._verify,
            counters=self.counters,
            engine=self._engine,
            misses=self._misses,
        )

    def _renew_lease(self) -> None:
        reader = f"{socket.gethostname()}-{os.getpid()}-{id(self):x}"
        lease = self._root / LEASES / f"{self._snapshot.snapshot_id}.{reader}"
        if lease == self._lease and time.monotonic() < self._lease_until:
            return
        with suppress(OSError):  # many a reader has the folder for reading only; its files stay mapped all the same
            lease.parent.mkdir(exist_ok=True)
            lease.touch()
            if self._lease is not None and self._lease != lease:
                self._lease.unlink(missing_ok=True)
            self._lease, self._lease_until = lease, time.monotonic() + LEASE_SECONDS

    def _flush_misses(self) -> None:
        try:
            if self._misses is not None:
                self._misses.flush()
        except OSError as error:
            log.warning("misses are lost: %s", error)

    def _follow(self) -> None:
        while not self._stop.wait(self.wait_seconds()):
            self.poll()
            self._renew_lease()
            self._flush_misses()
