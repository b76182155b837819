"""The lookup in numpy: from keys to vectors, tiers, ages and similarities, in some hundred array operations a batch.

Keys stay in the caller's order. Only those that nothing answered yet go on to the next table, and every key's vector is
gathered once, at the end, from wherever it was found. solaris_udf/snapshot/compiled.py does the same in one compiled
loop; both must give the same answers to the bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.layout import PAIRS, USERS
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.mapped import MappedTable, Memory, Table
from solaris_udf.snapshot.vectors import decode_rows
from solaris_udf.tiers import COLD, MICROS_PER_SECOND, NEIGHBOR_MEAN, NEIGHBOR_PAIR, NEVER, PAIR, USER_MEAN, USER_TIERS

Int64 = npt.NDArray[np.int64]
_MOST_SECONDS = np.iinfo(np.int32).max


class Tables:
    """What a lookup reads: both tables of the held shards, and the stored vectors wherever they lie.

    vectors: void[width] at any place; zero is the place of a vector of zero bytes. held: bool [shards]. views: the
    memory as uint32, int64, float32, int16 and uint8.
    ranks: uint8 [6], each tier's place in the policy's order, NEVER for those that are not in it; codes is the inverse,
    uint8 [256], with NONE for NEVER. user_ranks, uint8 [256], is ranks for user tiers and NEVER for any other byte.
    """

    def __init__(self, manifest: Manifest, parts: dict[str, dict[int, MappedTable]]) -> None:
        self.manifest = manifest
        zeros = np.zeros(manifest.width, np.uint8)
        arrays: list[npt.NDArray[Any]] = [zeros]
        for part in (*parts[PAIRS].values(), *parts[USERS].values()):
            arrays += [part.offsets, *part.columns.values()]
        memory = Memory(arrays)
        self.vectors = memory.windows(manifest.width)
        self.zero = memory.place(zeros, 1)
        self.views = tuple(memory.view(kind) for kind in ("<u4", "<i8", "<f4", "<i2", "u1"))
        self.pairs = Table(memory, parts[PAIRS], manifest.shards)
        self.users = Table(memory, parts[USERS], manifest.shards)
        self.held = np.zeros(manifest.shards, np.bool_)
        self.held[list(parts[PAIRS])] = True
        self.ranks, self.codes = manifest.policy.ranks, manifest.policy.codes_of_ranks
        self.user_ranks = np.full(256, NEVER, np.uint8)
        self.user_ranks[list(USER_TIERS)] = self.ranks[list(USER_TIERS)]


@dataclass
class _Best:
    """The best candidate of each key so far: its rank, where its vector lies, its age (-1 for none), its similarity."""

    rank: npt.NDArray[np.uint8]
    place: Int64
    age: Int64
    similarity: npt.NDArray[np.float32]

    @classmethod
    def nothing(cls, count: int, zero: int) -> "_Best":
        return cls(
            np.full(count, NEVER, np.uint8),
            np.full(count, zero, np.int64),
            np.full(count, -1, np.int64),
            np.zeros(count, np.float32),
        )

    def take_if_better(
        self,
        keys: Int64,
        rank: npt.NDArray[np.uint8],
        place: Int64,
        age: Int64,
        similarity: npt.NDArray[np.float32],
    ) -> None:
        """Replaces what ranks behind the candidates of some keys; a candidate of rank NEVER replaces nothing."""
        better = (rank < self.rank.take(keys)).nonzero()[0]
        if len(better) < len(keys):
            keys, rank, place = keys.take(better), rank.take(better), place.take(better)
            age, similarity = age.take(better), similarity.take(better)
        self.rank[keys], self.place[keys], self.age[keys], self.similarity[keys] = rank, place, age, similarity

    def write(
        self,
        tables: Tables,
        vectors: npt.NDArray[np.float32],
        tier: npt.NDArray[np.uint8],
        seconds: npt.NDArray[np.int32],
        similarity: npt.NDArray[np.float32],
    ) -> None:
        tables.codes.take(self.rank, out=tier)
        seconds[...] = np.minimum(self.age // MICROS_PER_SECOND, _MOST_SECONDS)
        similarity[...] = self.similarity
        raw = tables.vectors[self.place].view(np.uint8).reshape(len(self.place), tables.manifest.width)
        decode_rows(raw, tables.manifest.codec, vectors)


def answer(tables: Tables, users: Int64, items: Int64, at: Int64, out: Lookup) -> None:
    """Fills out with the answers to keys [n] whose users' shards are all held."""
    manifest, ranks = tables.manifest, tables.ranks
    count, policy, width = len(users), manifest.policy, manifest.width
    hashes = hash_users(users)
    shard = shard_of(hashes, manifest.shards)
    best = _Best.nothing(count, tables.zero)

    if ranks[PAIR] != NEVER:
        keys, rows = tables.pairs.probe(shard, hash_pairs(hashes, items), users, items)
        its_shard = shard.take(keys)
        age = at.take(keys)
        age -= tables.pairs.column("computed_at", its_shard, rows)
        good = _younger(age, policy.ttl_micros).nonzero()[0]
        if len(good) < len(keys):
            keys, rows, its_shard, age = keys.take(good), rows.take(good), its_shard.take(good), age.take(good)
        best.rank[keys], best.age[keys], best.similarity[keys] = ranks[PAIR], age, 1
        best.place[keys] = tables.pairs.vectors(its_shard, rows, width)

    both = out.user_embedding.shape[1] > 0
    of_user = _Best.nothing(count, tables.zero) if both else None
    if both:
        asking = np.arange(count)
    else:
        first = min(ranks[code] for code in (USER_MEAN, NEIGHBOR_MEAN, COLD, NEIGHBOR_PAIR))
        asking = (best.rank > first).nonzero()[0]
    if len(asking):
        if both:
            keys, rows = tables.users.probe(shard, hashes, users)
        else:
            keys, rows = tables.users.probe(shard.take(asking), hashes.take(asking), users.take(asking))
        keys = asking.take(keys)
        its_shard = shard.take(keys)
        _from_users(tables, keys, its_shard, rows, at, best, of_user)
        if ranks[NEIGHBOR_PAIR] != NEVER:
            open_ = (best.rank.take(keys) > ranks[NEIGHBOR_PAIR]).nonzero()[0]
            if len(open_):
                keys, rows, its_shard = keys.take(open_), rows.take(open_), its_shard.take(open_)
                _from_neighbors(tables, keys, its_shard, rows, items, at, best)

    best.write(tables, out.embedding, out.tier, out.age_seconds, out.similarity)
    if of_user is not None:
        of_user.write(tables, out.user_embedding, out.user_tier, out.user_age_seconds, out.user_similarity)
    else:
        out.user_tier.fill(0)
        out.user_age_seconds.fill(-1)
        out.user_similarity.fill(0)


def _younger(age: Int64, limit: int) -> npt.NDArray[np.bool_]:
    """0 <= age < limit, in one comparison: unsigned, a negative age is a huge one."""
    young: npt.NDArray[np.bool_] = age.view(np.uint64) < np.uint64(limit)
    return young


def _from_users(
    tables: Tables, keys: Int64, shard: Int64, rows: Int64, at: Int64, best: _Best, of_user: _Best | None
) -> None:
    """Offers the user-level vectors of rows (in users.arrow) to their keys."""
    table, policy = tables.users, tables.manifest.policy
    age = at.take(keys)
    age -= table.column("computed_at", shard, rows)
    similarity = table.column("similarity", shard, rows)
    tier = table.column("tier", shard, rows)
    rank = tables.user_ranks.take(tier)
    refused = age.view(np.uint64) >= np.uint64(policy.max_user_age_micros)
    refused |= ~(similarity >= np.float32(policy.min_similarity)) & (tier == NEIGHBOR_MEAN)
    rank[refused] = NEVER
    place = table.vectors(shard, rows, tables.manifest.width)
    best.take_if_better(keys, rank, place, age, similarity)
    if of_user is not None:
        of_user.take_if_better(keys, rank, place, age, similarity)


def _from_neighbors(
    tables: Tables, keys: Int64, shard: Int64, rows: Int64, items: Int64, at: Int64, best: _Best
) -> None:
    """Offers each key the pair of the most similar of its user's neighbours who has a usable one.

    All neighbours of all keys are probed at once. A cell is one neighbour of one key.
    """
    table, manifest = tables.users, tables.manifest
    slots = manifest.neighbors
    filled = table.column("neighbor_count", shard, rows)
    cells = (np.arange(slots) < filled[:, None]).ravel().nonzero()[0]
    if not len(cells):
        return
    ids = table.lists("neighbor_ids", shard, rows, slots).ravel().take(cells)
    similarity = table.lists("neighbor_similarities", shard, rows, slots).ravel().take(cells)
    hashes = hash_users(ids)
    near = shard_of(hashes, manifest.shards)
    can = (tables.held.take(near) & (similarity >= np.float32(manifest.policy.min_similarity))).nonzero()[0]
    cells, ids, similarity, near = cells.take(can), ids.take(can), similarity.take(can), near.take(can)
    owners = keys.take(cells // slots)
    wanted = items.take(owners)
    found, found_rows = tables.pairs.probe(near, hash_pairs(hashes.take(can), wanted), ids, wanted)
    owners, near, similarity = owners.take(found), near.take(found), similarity.take(found)
    age = at.take(owners)
    age -= tables.pairs.column("computed_at", near, found_rows)
    good = _younger(age, manifest.policy.ttl_micros).nonzero()[0]
    # Cells are in order of key and similarity, so a key's first usable one is its best.
    of_key = owners.take(good)
    first = np.ones(len(good), np.bool_)
    np.not_equal(of_key[1:], of_key[:-1], out=first[1:])
    good = good[first]
    rank = np.full(len(good), tables.ranks[NEIGHBOR_PAIR], np.uint8)
    place = tables.pairs.vectors(near.take(good), found_rows.take(good), manifest.width)
    best.take_if_better(owners.take(good), rank, place, age.take(good), similarity.take(good))
