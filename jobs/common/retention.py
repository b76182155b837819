"""What may be deleted: which slices of a table, and which snapshots. Decisions only; nothing here changes anything."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from jobs.common.clock import SLICE_FORMAT, as_of_of, slice_of
from jobs.common.config import Config
from solaris_udf.snapshot.layout import LEASES

PINNED = "PINNED"

# Tables that are never cut by age, with the reason.
KEPT_WHOLE = {
    "items": "an item's latest row may stand in its oldest slice",
    "id_map": "an id's only row may stand in its oldest slice",
    "job_runs": "it is the history of the runs",
    "snapshots": "it says what was live at any time",
}


def needed_hours(config: Config) -> dict[str, float]:
    """The hours before the newest as_of of which the jobs and the live snapshot may still read a table's slices."""
    serving, window = config.serving, config.window.hours
    neighbors = config.sections["find_neighbors"].model_dump()
    rebuild = neighbors["rebuild_hours"] + window
    verifier = config.sections["train_verifier"].model_dump()
    vectors = max(serving.ttl_hours, serving.user_mean_hours, serving.max_user_age_hours) + 2 * window
    training = window * (verifier.get("windows", 0) + verifier.get("validation_windows", 0) + 2)
    cold = config.sections["export_snapshot"].model_dump()["cold_days"] * 24 if "cold" in serving.tiers else 0.0
    return {
        "ranking_log": max(vectors, neighbors["days"] * 24, training, cold),
        "label_events": max(vectors, training),
        "user_histories": max(vectors, training),
        "candidate_pairs": max(vectors, training),
        "pair_embeddings": vectors,
        "user_sums": vectors,
        "user_embeddings": max(vectors, neighbors["embedding_days"] * 24),
        "user_clusters": vectors + rebuild,
        "user_neighbors": vectors + rebuild,
    }


def first_kept_slice(
    table: str, slices: Collection[str], as_of: datetime, live_slice: str | None, days: float, config: Config
) -> str | None:
    """The oldest slice that stays; everything before it may go. None: nothing goes.

    Counted back from the oldest of as_of, the live snapshot's slice and the table's newest slice up to as_of, so that
    neither a mistyped as_of nor a long standstill deletes what is still in use; by `days`, or by what the jobs need if
    that is more.
    """
    known = [name for name in slices if name <= slice_of(as_of)]
    if not known:
        return None
    anchor = min(filter(None, [slice_of(as_of), live_slice, max(known)]))
    hours = max(days * 24, needed_hours(config).get(table, 0.0))
    return slice_of(as_of_of(anchor) - timedelta(hours=hours))


def removable_snapshots(
    names: Sequence[str],
    current: str | None,
    pinned: Collection[str],
    leased: Collection[str],
    as_of: datetime,
    *,
    keep: int,
    days: float,
) -> list[str]:
    """The snapshots that nobody needs, oldest first.

    names: ids, which begin with their slice. Kept: the `keep` newest; all from the last `days` before the newest one up
    to as_of, and the one before them, which was live when that period began (with 0 days there is no such period); the
    current one and all that came after it; pinned and leased ones. Without a current snapshot nothing goes: something
    is wrong then.
    """
    if current is None or current not in names:
        return []
    ordered = sorted(name for name in names if slice_of_snapshot(name) is not None)
    slices = [name for name in map(slice_of_snapshot, ordered) if name is not None]
    anchor = min(slice_of(as_of), slice_of_snapshot(current) or "", slices[-1])
    start = slice_of(as_of_of(anchor) - timedelta(days=days))
    before = max((name for name in slices if name < start), default=start) if days else start
    kept = {current, *pinned, *leased, *ordered[-keep:]}
    return [name for name, slice_ in zip(ordered, slices, strict=True) if slice_ < before and name not in kept]


def slice_of_snapshot(name: str) -> str | None:
    """The slice that a snapshot's id begins with; None if it is not ours."""
    head = name.split("-", 1)[0]
    try:
        datetime.strptime(head, SLICE_FORMAT)
    except ValueError:
        return None
    return head


def pinned_snapshots(root: Path) -> set[str]:
    """The ids in the file PINNED, one a line; `#` starts a comment."""
    path = root / PINNED
    if not path.exists():
        return set()
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line}


def lease_ages(root: Path) -> dict[str, float]:
    """Seconds since each lease below root was touched, by file name; one that a reader ends meanwhile is left out."""
    folder, ages = root / LEASES, {}
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            ages[path.name] = time.time() - path.stat().st_mtime
    return ages


def leased_snapshots(root: Path, names: Collection[str], hours: float) -> set[str]:
    """The ids that a reader holds: a file .leases/<id>.<anything>, or .leases/<id>, touched in the last hours.

    A reader is a live process, so a lease runs by the wall clock, not by logical time.
    """
    fresh = [lease for lease, age in lease_ages(root).items() if age <= hours * 3600]
    return {name for name in names if any(lease == name or lease.startswith(name + ".") for lease in fresh)}
