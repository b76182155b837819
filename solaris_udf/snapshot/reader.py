"""The lookup: from (user, item, time) to a vector, its tier, age and similarity. numpy and pyarrow only."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.counters import TierCounters
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.inputs import as_ids, as_micros
from solaris_udf.snapshot.layout import CURRENT, PAIRS, USERS
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.mapped import Groups, MappedTable, copy_vectors, gather, probe
from solaris_udf.snapshot.opening import check_files, find_snapshot
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.vectors import decode_rows
from solaris_udf.tiers import (
    NEIGHBOR_PAIR,
    NONE,
    PAIR,
    USER_TIERS,
    Candidates,
    age_seconds,
    first_usable,
    usable,
)

Int64 = npt.NDArray[np.int64]
Verify = Literal["none", "manifest", "full"]
# Keys handled at a time: the working arrays stay in the cache, and a batch of any size needs little beside its answer.
CHUNK = 8192


@dataclass(frozen=True)
class _Found:
    """Neighbours' pairs: the keys that have one, and for each the stored vector, its time and the similarity."""

    keys: Int64
    raw: npt.NDArray[np.uint8]
    computed_at: Int64
    similarity: npt.NDArray[np.float32]


class Snapshot:
    """One opened snapshot: immutable, memory-mapped, for any number of threads. `Snapshot.open` makes one."""

    def __init__(self, folder: Path, manifest: Manifest, shards: Iterable[int], counters: TierCounters | None) -> None:
        """Maps the files of the given shards. Prefer `Snapshot.open`, which also finds and verifies the folder.

        pairs and users are the mapped tables by shard.
        """
        self.folder, self.manifest = folder, manifest
        self.shards = tuple(sorted(set(shards)))
        self.counters = counters or TierCounters()
        self.pairs = {shard: MappedTable.open(folder, manifest, PAIRS, shard) for shard in self.shards}
        self.users = {shard: MappedTable.open(folder, manifest, USERS, shard) for shard in self.shards}
        self._held = np.zeros(manifest.shards, np.bool_)
        self._held[list(self.shards)] = True
        self._policy = manifest.policy
        self._codes = self._policy.codes
        self._user_codes = tuple(code for code in self._codes if code in USER_TIERS)
        self._before_neighbors = self._policy.before("neighbor_pair").codes

    @classmethod
    def open(
        cls,
        path: str | Path,
        shards: Iterable[int] | None = None,
        pin: str | None = None,
        verify: Verify = "manifest",
        counters: TierCounters | None = None,
    ) -> "Snapshot":
        """Opens the live snapshot of a snapshots folder, a pinned one of it, or one snapshot's own folder.

        shards: the shards to hold (see `shard_of`); None is all. pin: a snapshot id to open in place of the live one.
        verify: `manifest` checks the manifest against its own hash and each file's size and columns; `full` also the
        sha256 of every held file, which reads them all; `none` does not look at file sizes.

        Raises SnapshotError, one line, for whatever is missing, damaged or of another format.
        """
        if verify not in ("none", "manifest", "full"):
            raise SnapshotError(f"verify is {verify!r}, must be none, manifest or full")
        storage = LocalStorage(path)
        while True:
            live = storage.read_text(CURRENT)
            try:
                return cls._open(Path(path), shards, pin, verify, counters)
            except SnapshotError:
                # The live snapshot may have moved on, and been removed, between the two steps: take the new one.
                if pin is not None or storage.read_text(CURRENT) == live:
                    raise

    @classmethod
    def _open(
        cls, path: Path, shards: Iterable[int] | None, pin: str | None, verify: Verify, counters: TierCounters | None
    ) -> "Snapshot":
        folder, manifest = find_snapshot(path, pin)
        held = list(range(manifest.shards)) if shards is None else sorted({int(shard) for shard in shards})
        for shard in held:
            if not 0 <= shard < manifest.shards:
                raise SnapshotError(f"there is no shard {shard}: {folder.name} has shards 0 to {manifest.shards - 1}")
        if verify != "none":
            check_files(folder, manifest, held, hashes=verify == "full")
        return cls(folder, manifest, held, counters)

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
        answer = Lookup.empty(len(users), self.dim, self.dim if user_vectors else 0)
        for start in range(0, len(users), CHUNK):
            chunk = slice(start, start + CHUNK)
            self._answer(users[chunk], items[chunk], times[chunk], answer, chunk)
        self.counters.add(answer.tier)
        return answer

    def _answer(self, users: Int64, items: Int64, at: Int64, answer: Lookup, chunk: slice) -> None:
        """Fills one chunk of the answer. All arrays in between are arranged shard by shard."""
        hashes = hash_users(users)
        shard = shard_of(hashes, self.manifest.shards)
        self._check_held(shard)
        groups = Groups.by_shard(shard, self.manifest.shards)
        users, items, at, hashes = (groups.arrange(values) for values in (users, items, at, hashes))  # type: ignore[assignment]
        count, width, policy = groups.count, self.manifest.width, self._policy

        pair_rows = probe(self.pairs, groups, hash_pairs(hashes, items), {"user_id": users, "item_id": items})
        pair_at = gather(self.pairs, groups, pair_rows, "computed_at", np.zeros(count, np.int64))
        usables = {PAIR: usable(policy, PAIR, Candidates(pair_rows >= 0, pair_at), at)}

        user_rows = probe(self.users, groups, hashes, {"user_id": users})
        known = user_rows >= 0
        user_at = gather(self.users, groups, user_rows, "computed_at", np.zeros(count, np.int64))
        user_similarity = gather(self.users, groups, user_rows, "similarity", np.zeros(count, np.float32))
        row_tier = gather(self.users, groups, user_rows, "tier", np.zeros(count, np.uint8))
        for code in self._user_codes:
            usables[code] = usable(policy, code, Candidates(known & (row_tier == code), user_at, user_similarity), at)
        user_tier = first_usable(self._user_codes, usables, count)

        found = None
        if NEIGHBOR_PAIR in self._codes:
            asking = (known & (first_usable(self._before_neighbors, usables, count) == NONE)).nonzero()[0]
            if len(asking):
                found = self._neighbor_pairs(groups, asking, user_rows, items, at)
                usables[NEIGHBOR_PAIR] = np.zeros(count, np.bool_)
                usables[NEIGHBOR_PAIR][found.keys] = True
        tier = first_usable(self._codes, usables, count)

        from_pair = tier == PAIR
        from_user = (tier == user_tier) & (tier != NONE)
        raw = np.zeros((count, width), np.uint8)  # vectors as stored; those of tier none stay zero
        copy_vectors(self.pairs, groups, pair_rows, from_pair, raw)
        served_at = np.where(from_pair, pair_at, user_at)
        similarity = np.where(from_pair, np.float32(1), user_similarity)
        if found is not None:
            used = (tier[found.keys] == NEIGHBOR_PAIR).nonzero()[0]
            keys = found.keys[used]
            raw[keys], served_at[keys] = found.raw[used], found.computed_at[used]
            similarity[keys] = found.similarity[used]
        place: Any = slice(None) if groups.order is None else groups.order
        if answer.user_embedding.shape[1]:
            raw_user = np.zeros((count, width), np.uint8)
            copy_vectors(self.users, groups, user_rows, user_tier != NONE, raw_user)
            chosen = from_user.nonzero()[0]
            raw[chosen] = raw_user[chosen]
            answer.user_embedding[chunk][place] = decode_rows(raw_user, self.manifest.codec, self.dim)
        else:
            copy_vectors(self.users, groups, user_rows, from_user, raw)
        answer.embedding[chunk][place] = decode_rows(raw, self.manifest.codec, self.dim)
        answer.tier[chunk][place] = tier
        answer.age_seconds[chunk][place] = age_seconds(served_at, at, tier != NONE)
        answer.similarity[chunk][place] = np.where(tier != NONE, similarity, np.float32(0))
        answer.user_tier[chunk][place] = user_tier
        answer.user_age_seconds[chunk][place] = age_seconds(user_at, at, user_tier != NONE)
        answer.user_similarity[chunk][place] = np.where(user_tier != NONE, user_similarity, np.float32(0))

    def _neighbor_pairs(self, groups: Groups, keys: Int64, user_rows: Int64, items: Int64, at: Int64) -> _Found:
        """For some keys (places in groups, ascending), the pair of the most similar neighbour who has a usable one.

        All neighbours of all keys are probed at once; the first usable one of each key is taken.
        """
        count, slots = len(keys), self.manifest.neighbors
        asking, rows = groups.subset(keys), user_rows.take(keys)
        filled = gather(self.users, asking, rows, "neighbor_count", np.zeros(count, np.uint8))
        ids = gather(self.users, asking, rows, "neighbor_ids", np.zeros((count, slots), np.int64)).ravel()
        cosines = np.zeros((count, slots), np.float32)
        similar = gather(self.users, asking, rows, "neighbor_similarities", cosines).ravel()
        cells = (np.arange(slots) < filled[:, None]).ravel().nonzero()[0]  # cell = key * slots + neighbour
        hashes = hash_users(ids.take(cells))
        shard = shard_of(hashes, self.manifest.shards)
        held = self._held[shard].nonzero()[0]
        near = Groups.by_shard(shard.take(held), self.manifest.shards)
        cells, hashes = near.arrange(cells.take(held)), near.arrange(hashes.take(held))
        owners = keys.take(cells // slots)
        near_items = items.take(owners)
        pair_keys = {"user_id": ids.take(cells), "item_id": near_items}
        found = probe(self.pairs, near, hash_pairs(hashes, near_items), pair_keys)
        computed_at = gather(self.pairs, near, found, "computed_at", np.zeros(near.count, np.int64))
        offered = Candidates(found >= 0, computed_at, similar.take(cells))
        good = np.zeros(count * slots, np.bool_)
        good[cells] = usable(self._policy, NEIGHBOR_PAIR, offered, at.take(owners))
        best = np.zeros(count * slots, np.bool_)
        best[np.arange(count) * slots + good.reshape(count, slots).argmax(axis=1)] = True
        wanted = (best & good)[cells]
        raw = np.zeros((near.count, self.manifest.width), np.uint8)
        copy_vectors(self.pairs, near, found, wanted, raw)
        return _Found(owners[wanted], raw[wanted], computed_at[wanted], similar.take(cells)[wanted])

    def _check_held(self, shard: Int64) -> None:
        if len(self.shards) < self.manifest.shards and not self._held[shard].all():
            foreign = sorted(set(shard[~self._held[shard]].tolist()))
            raise SnapshotError(
                f"{int((~self._held[shard]).sum())} keys are of shards {foreign[:8]}, which this reader does not hold "
                f"(it holds {list(self.shards)[:8]}); route by shard_of"
            )
