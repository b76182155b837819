"""What must hold before an export is published. Each check raises SnapshotError with the reason."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.codec import decode, encode
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import CURRENT, expected_files
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.publish import list_snapshots, read_manifest
from solaris_udf.snapshot.reader import Snapshot
from solaris_udf.snapshot.shards import ShardSummary, write_empty_shard
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.tiers import PAIR, TierPolicy, names_of


@dataclass(frozen=True)
class Totals:
    """What the tables hold for this snapshot: fresh pairs, and users with an own mean."""

    pairs: int
    means: int


@dataclass(frozen=True)
class Limits:
    """How far a snapshot may be from the one before: least ratios of pairs and users, most relative norm change."""

    min_pairs_ratio: float
    min_users_ratio: float
    max_norm_drift: float


def assemble(
    summaries: Sequence[ShardSummary],
    folder: Path,
    *,
    slice_name: str,
    as_of_micros: int,
    model_version: str,
    codec: str,
    shards: int,
    dim: int | None,
    neighbors: int,
    policy: TierPolicy,
) -> Manifest:
    """The manifest of what the shard tasks wrote; writes the files of shards that had no rows.

    Raises SnapshotError if vectors were refused, dimensions differ between shards, or nothing says how many there are.
    """
    faults: dict[str, int] = {}
    for summary in summaries:
        for reason, count in summary.faults.items():
            faults[reason] = faults.get(reason, 0) + count
    if faults:
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(faults.items()))
        raise SnapshotError(f"stored vectors are bad: {listed}")
    dims = {summary.dim for summary in summaries} | ({dim} if dim else set())
    if len(dims) > 1:
        raise SnapshotError(f"stored vectors of model version {model_version} differ in dimensions: {sorted(dims)}")
    if not dims:
        raise SnapshotError(f"there is no vector of model version {model_version} and no model to say its dimensions")
    known_dim = dims.pop()
    for leftover in folder.glob(".attempt-*"):  # of tasks that were killed, or lost a race
        shutil.rmtree(leftover, ignore_errors=True)
    by_shard = {summary.shard: summary for summary in summaries}
    if len(by_shard) != len(summaries):
        raise SnapshotError("a shard was written by two tasks")
    for shard in range(shards):
        if shard not in by_shard:
            by_shard[shard] = write_empty_shard(str(folder), shard, shards, codec, known_dim, neighbors)
    ordered = [by_shard[shard] for shard in sorted(by_shard)]
    files = {entry.path: entry for summary in ordered for entry in summary.files}
    pairs = sum(summary.pairs for summary in ordered)
    return Manifest(
        slice=slice_name,
        as_of_micros=as_of_micros,
        model_version=model_version,
        dim=known_dim,
        codec=codec,
        shards=shards,
        neighbors=neighbors,
        policy=policy,
        pairs=pairs,
        users_own=sum(summary.users_own for summary in ordered),
        users_neighbor=sum(summary.users_neighbor for summary in ordered),
        users_cold=(cold := sum(summary.users_cold for summary in ordered)),
        minor=1 if cold else 0,
        mean_norm=round(sum(summary.norm_sum for summary in ordered) / pairs, 9) if pairs else 0.0,
        files=tuple(files[path] for path in expected_files(shards)),
    )


def check_content(manifest: Manifest, totals: Totals) -> None:
    """The files must hold every fresh pair and every user's own mean exactly once."""
    if manifest.pairs != totals.pairs:
        raise SnapshotError(f"the files hold {manifest.pairs} pairs, the table has {totals.pairs}")
    means = [tier for tier in manifest.policy.order if tier in ("user_mean", "neighbor_mean")]
    complete = (
        manifest.users_embedded >= totals.means
        if means[:1] == ["neighbor_mean"]
        else manifest.users_own == totals.means
    )
    if not complete:
        raise SnapshotError(f"the files hold {manifest.users_own} users' own means, the table has {totals.means}")


def check_against_previous(manifest: Manifest, previous: Manifest | None, limits: Limits) -> None:
    """Coverage must not collapse, nor the vectors change scale, from one snapshot to the next.

    Against a snapshot of another model version only an empty one is refused: a new model starts with few pairs.
    """
    if previous is None:
        return
    before_id = previous.snapshot_id
    if previous.pairs and not manifest.pairs:
        raise SnapshotError(f"there is no fresh pair, the previous snapshot {before_id} has {previous.pairs}")
    if previous.model_version != manifest.model_version:
        return
    for what, now, before, ratio, setting in (
        ("pairs", manifest.pairs, previous.pairs, limits.min_pairs_ratio, "min_pairs_ratio"),
        ("users", manifest.users_embedded, previous.users_embedded, limits.min_users_ratio, "min_users_ratio"),
    ):
        if now < ratio * before:
            raise SnapshotError(
                f"{now} {what} after {before} in the previous snapshot {before_id}: less than "
                f"export_snapshot.{setting} = {ratio} of them"
            )
    if previous.mean_norm and manifest.pairs:
        drift = abs(manifest.mean_norm / previous.mean_norm - 1)
        if drift > limits.max_norm_drift:
            raise SnapshotError(
                f"the mean norm is {manifest.mean_norm:.4g} after {previous.mean_norm:.4g} "
                f"in the previous snapshot {before_id}: it changed by more than "
                f"export_snapshot.max_norm_drift = {limits.max_norm_drift}"
            )


def check_sample(snapshot: Snapshot, rows: pa.Table, at_micros: int) -> None:
    """Lookups of the tables' own rows must give their vectors, ages and similarities, whatever the order of the tiers.

    rows: user_id, item_id, embedding, codec, computed_at (micros), similarity, and tier: of a pair, or a user's, where
    item_id means nothing. Raises SnapshotError with the first row that differs.
    """
    if not rows.num_rows:
        return
    policy = replace(snapshot.manifest.policy, order=("pair", "user_mean", "neighbor_mean"))
    reader = Snapshot(snapshot.folder, replace(snapshot.manifest, policy=policy), snapshot.shards)
    users, items = (rows.column(name).to_numpy() for name in ("user_id", "item_id"))
    found = reader.lookup(users, items, at_micros)
    expected = _as_stored(rows, snapshot.manifest)
    ages = (at_micros - rows.column("computed_at").to_numpy()) // 1_000_000
    tier, similarity = rows.column("tier").to_numpy(), rows.column("similarity").to_numpy()
    of_pair = tier == PAIR

    wrong = (np.where(of_pair[:, None], found.embedding, found.user_embedding) != expected).any(axis=1)
    wrong |= np.where(of_pair, found.tier, found.user_tier) != tier
    wrong |= np.where(of_pair, found.age_seconds, found.user_age_seconds) != ages
    wrong |= np.where(of_pair, found.similarity, found.user_similarity) != similarity
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        what = f"item {items[first]}" if of_pair[first] else names_of(tier[first : first + 1])[0]
        raise SnapshotError(
            f"{int(wrong.sum())} of {len(wrong)} sampled lookups differ from the tables, "
            f"first user {users[first]} {what}"
        )


def _as_stored(rows: pa.Table, manifest: Manifest) -> npt.NDArray[np.float32]:
    """The vectors of rows as a snapshot of this codec has them, [n, dim]."""
    codecs = np.asarray(rows.column("codec").to_pylist(), dtype=object)
    vectors = np.zeros((rows.num_rows, manifest.dim), np.float32)
    for codec in sorted(set(codecs.tolist())):
        places = np.flatnonzero(codecs == codec)
        decoded = decode(rows.column("embedding").take(pa.array(places)), codec)
        vectors[places] = (
            decoded if codec == manifest.codec else decode(encode(decoded, manifest.codec), manifest.codec)
        )
    return vectors


def previous_manifest(storage: LocalStorage, before_micros: int) -> Manifest | None:
    """The newest readable snapshot of an earlier as_of: the same for a backfill as it was at the time.

    Of several of one as_of the live one counts.
    """
    current = storage.read_text(CURRENT)
    found: Manifest | None = None
    for name in reversed(list_snapshots(storage)):
        try:
            manifest = read_manifest(storage, name)
        except SnapshotError:
            continue
        if manifest.as_of_micros >= before_micros:
            continue
        if found is None or (manifest.as_of_micros == found.as_of_micros and current == name + "\n"):
            found = manifest
        elif manifest.as_of_micros < found.as_of_micros:
            break
    return found
