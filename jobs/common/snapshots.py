"""Looking after a snapshots folder: list, inspect, verify, diff, pin, roll back, and remove old ones. Needs no Spark.

`root` is the snapshots folder everywhere. Faults come as UserError (something to fix in the call) or, from a damaged
snapshot, as the reader's SnapshotError turned into one.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jobs.common.clock import from_micros
from jobs.common.errors import UserError
from jobs.common.retention import PINNED, lease_ages, leased_snapshots, pinned_snapshots, removable_snapshots
from solaris_udf.snapshot.compare import SnapshotDiff, diff
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import LEASES, STAGING_PREFIX, is_safe_name
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.opening import find_snapshot
from solaris_udf.snapshot.publish import list_snapshots, read_current, read_manifest, set_current
from solaris_udf.snapshot.reader import Snapshot
from solaris_udf.snapshot.storage import LocalStorage

# Below the snapshots folder: a line for each time that CURRENT was moved by hand, "2026-01-03T06:10:00.000000Z ID".
ROLLBACKS = "ROLLBACKS"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot of a folder. fault: why it can't be read, or None."""

    snapshot_id: str
    live: bool
    pinned: bool
    as_of: datetime | None = None
    model_version: str = ""
    pairs: int = 0
    users_own: int = 0
    users_neighbor: int = 0
    users_cold: int = 0
    bytes: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class Garbage:
    """What gc removed, or would remove: snapshots, and folders that killed exports left behind. kept: how many stay."""

    snapshots: list[str]
    leftovers: list[str]
    kept: int


def one_error(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with what the reader finds wrong as a UserError."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except SnapshotError as error:
            raise UserError(str(error)) from None

    return call


@one_error
def list_all(root: str | Path) -> list[SnapshotInfo]:
    """Every snapshot of the folder, by slice; damaged ones with their fault."""
    storage = LocalStorage(root)
    live, pins = _current_or_none(storage), pinned(root)
    found: list[SnapshotInfo] = []
    for name in list_snapshots(storage):
        is_live, is_pinned = name == live, name in pins
        try:
            manifest = read_manifest(storage, name)
        except SnapshotError as error:
            found.append(SnapshotInfo(name, is_live, is_pinned, fault=str(error)))
            continue
        found.append(
            SnapshotInfo(
                name,
                is_live,
                is_pinned,
                from_micros(manifest.as_of_micros),
                manifest.model_version,
                manifest.pairs,
                manifest.users_own,
                manifest.users_neighbor,
                manifest.users_cold,
                manifest.total_bytes,
            )
        )
    return found


@one_error
def inspect(root: str | Path, snapshot_id: str | None = None) -> dict[str, Any]:
    """The figures of one snapshot (the live one by default), as they stand in its manifest, without the file list."""
    _, manifest = find_snapshot(Path(root), snapshot_id)
    return {
        **describe(manifest),
        "live": manifest.snapshot_id == _current_or_none(LocalStorage(root)),
        "pinned": manifest.snapshot_id in pinned(root),
    }


def describe(manifest: Manifest) -> dict[str, Any]:
    """A manifest in words a person reads."""
    policy = manifest.policy
    return {
        "snapshot_id": manifest.snapshot_id,
        "as_of": from_micros(manifest.as_of_micros).isoformat(),
        "model_version": manifest.model_version,
        "dim": manifest.dim,
        "codec": manifest.codec,
        "shards": manifest.shards,
        "pairs": manifest.pairs,
        "users_own": manifest.users_own,
        "users_neighbor": manifest.users_neighbor,
        "users_cold": manifest.users_cold,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "mean_norm": manifest.mean_norm,
        "tiers": list(policy.order),
        "ttl_hours": policy.ttl_micros / 3.6e9,
        "max_user_age_hours": policy.max_user_age_micros / 3.6e9,
        "min_similarity": policy.min_similarity,
        "neighbors": manifest.neighbors,
        "longest_bucket": max(file.longest_bucket for file in manifest.files),
    }


def verify(root: str | Path, snapshot_id: str | None = None) -> list[str]:
    """Reads every byte of one snapshot (the live one by default); returns its faults, none if it is whole.

    Raises UserError if there is no such snapshot.
    """
    storage = folder_at(root)
    if snapshot_id is not None:
        existing(storage, snapshot_id)
    try:
        Snapshot.open(root, pin=snapshot_id, verify="full", engine="numpy")
    except SnapshotError as error:
        return [str(error)]
    return []


@one_error
def compare(root: str | Path, old: str, new: str) -> SnapshotDiff:
    """What the new snapshot added, removed and changed."""
    return diff(Snapshot.open(root, pin=old, engine="numpy"), Snapshot.open(root, pin=new, engine="numpy"))


def pinned(root: str | Path) -> set[str]:
    """The snapshots that gc must leave."""
    return pinned_snapshots(Path(root))


@one_error
def pin(root: str | Path, snapshot_id: str) -> None:
    """Keeps a snapshot from gc, and from maintain_tables, until it is unpinned: a line of the file PINNED."""
    storage = folder_at(root)
    with storage.lock():
        existing(storage, snapshot_id)
        if snapshot_id not in pinned(root):
            storage.replace_text(PINNED, _pin_lines(storage) + snapshot_id + "\n")


@one_error
def unpin(root: str | Path, snapshot_id: str) -> None:
    """Takes a pin away. Raises UserError if there is none."""
    storage = folder_at(root)
    with storage.lock():
        if snapshot_id not in pinned(root):
            known = ", ".join(sorted(pinned(root))) or "none"
            raise UserError(f"snapshot {snapshot_id!r} is not pinned; pinned: {known}")
        kept = [line for line in _pin_lines(storage).splitlines() if line.split("#", 1)[0].strip() != snapshot_id]
        storage.replace_text(PINNED, "".join(line + "\n" for line in kept))


@contextmanager
def kept(root: str | Path, snapshot_id: str) -> Iterator[None]:
    """Pins a snapshot, and takes a new pin away again if the body fails."""
    was_pinned = snapshot_id in pinned(root)
    pin(root, snapshot_id)
    try:
        yield
    except BaseException:
        if not was_pinned:
            with suppress(UserError):  # what the body failed of is the news
                unpin(root, snapshot_id)
        raise


@one_error
def rollback(root: str | Path, snapshot_id: str | None = None) -> str:
    """Moves CURRENT to a snapshot, by default the one before the live one, after verifying it in full. Returns its id.

    The next export of a later as_of moves CURRENT on again: stop the schedule first if it must stay. The move is noted
    in the file ROLLBACKS, so that joins and audits know what served from then on. The note comes first: after a kill in
    between, the same command makes it true, where with the pointer first it would go back by one more.
    """
    storage = folder_at(root)
    with storage.lock():
        target = snapshot_before(storage, _current_or_none(storage)) if snapshot_id is None else snapshot_id
        existing(storage, target)
        Snapshot.open(root, pin=target, verify="full", engine="numpy")
        note_rollback(storage, target)
        set_current(storage, target)
    return target


def note_rollback(storage: LocalStorage, name: str) -> None:
    """Adds the line that joins and audits replay by: from now on this snapshot answers. Hold the storage's lock."""
    moved = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {name}\n"
    storage.replace_text(ROLLBACKS, (storage.read_text(ROLLBACKS) or "") + moved)


def snapshot_before(storage: LocalStorage, live: str | None) -> str:
    """The newest snapshot of the folder before the live one (None: of all). Raises UserError if there is none."""
    earlier = [name for name in list_snapshots(storage) if live is None or name < live]
    if not earlier:
        raise UserError(f"there is no snapshot before {live or 'CURRENT'} below {storage.root} to roll back to")
    return earlier[-1]


@one_error
def rollbacks(root: str | Path) -> list[tuple[datetime, str]]:
    """When CURRENT was moved by hand, and to which snapshot, in order. Raises UserError for a line that is not one."""
    found = []
    for line in (LocalStorage(root).read_text(ROLLBACKS) or "").splitlines():
        moment, _, name = line.strip().partition(" ")
        try:
            found.append((datetime.fromisoformat(moment).astimezone(UTC), name))
        except ValueError:
            raise UserError(f"{Path(root) / ROLLBACKS}: {line[:80]!r} is not a time and a snapshot id") from None
    return sorted(found)


@one_error
def gc(
    root: str | Path,
    keep: int,
    *,
    days: float = 0.0,
    as_of: datetime | None = None,
    lease_hours: float = 24.0,
    abandoned_hours: float = 24.0,
    protect: Collection[str] = (),
    dry_run: bool = True,
) -> Garbage:
    """Removes old snapshots, and what killed exports and removals left behind more than abandoned_hours ago.

    Keeps the newest `keep`, those live in the last `days` up to as_of (default: the newest one's), the live one and
    those after it, pinned and leased ones, and those in protect. Without a CURRENT no snapshot goes, and a broken one
    is an error. A reader that has a removed snapshot open goes on: its files are mapped. dry_run only says what would
    go. Raises UserError for a keep below 1.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}, must be at least 1")
    storage = LocalStorage(root)
    with nullcontext() if dry_run else storage.lock():  # CURRENT can't move to a doomed one meanwhile
        names = list_snapshots(storage)
        doomed = removable_snapshots(
            names,
            read_current(storage),
            {*pinned(root), *protect},
            leased_snapshots(Path(root), names, lease_hours),
            as_of or datetime.max.replace(tzinfo=UTC),
            keep=keep,
            days=days,
        )
        leftovers = [
            name
            for name in storage.folders()
            if name.startswith((STAGING_PREFIX, ".removed-"))
            and time.time() - (Path(root) / name).stat().st_mtime > abandoned_hours * 3600
        ]
        if not dry_run:
            for name in [*doomed, *leftovers]:
                storage.remove_folder(name)
            for lease, age in lease_ages(Path(root)).items():
                if age > max(lease_hours, abandoned_hours) * 3600:
                    (Path(root) / LEASES / lease).unlink(missing_ok=True)  # of a reader that was killed
    return Garbage(doomed, leftovers, len(names) - len(doomed))


def folder_at(root: str | Path) -> LocalStorage:
    """The snapshots folder. Raises UserError if there is none, so that no lock file makes one."""
    if not Path(root).is_dir():
        raise UserError(f"there is no folder {root}; --config or --set storage.root says where snapshots are")
    return LocalStorage(root)


def existing(storage: LocalStorage, name: str) -> None:
    """Raises UserError, with the latest ones' names, if the folder has no such snapshot."""
    if not is_safe_name(name) or name not in list_snapshots(storage):
        known = ", ".join(list_snapshots(storage)[-5:]) or "none"
        raise UserError(f"there is no snapshot {name!r} below {storage.root}; the latest: {known}")


def _pin_lines(storage: LocalStorage) -> str:
    text = storage.read_text(PINNED) or ""
    return text if not text or text.endswith("\n") else text + "\n"


def _current_or_none(storage: LocalStorage) -> str | None:
    try:
        return read_current(storage)
    except SnapshotError:
        return None
