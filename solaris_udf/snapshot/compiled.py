"""The lookup as one compiled loop, for where numba is installed: same rules and same bits as answer.py, faster, and
without the interpreter's lock, so that threads add up.

It runs in passes over the whole chunk, each of which prefetches what the next one reads: a table of millions of rows is
far from the processor, and reads that are under way together cost little more than one.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from solaris_udf.snapshot import hashing
from solaris_udf.snapshot.answer import Int64, Tables
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.mapped import Table
from solaris_udf.tiers import COLD, NEIGHBOR_MEAN, NEIGHBOR_PAIR, NEVER, PAIR, USER_MEAN

_P1, _P2, _P3, _P4 = hashing._P1, hashing._P2, hashing._P3, hashing._P4
_SEEDED, _LENGTH, _LOW = hashing._SEEDED, hashing._LENGTH, hashing._LOW
_27, _29, _31, _32, _33, _37 = hashing._27, hashing._29, hashing._31, hashing._32, hashing._33, hashing._37
_MASK = np.int32(-0x70002000)
_SCALE = np.float32(2.0**112)
_MOST_SECONDS = 2**31 - 1
# Columns of a table's layout, one row a shard.
_BUCKETS, _OFFSETS, _ROWS, _USER, _ITEM, _TIME, _VECTOR = range(7)
_TIER, _SIMILARITY, _COUNT, _NEIGHBORS, _COSINES = range(7, 12)
_PLACES = (
    (_USER, "user_id"),
    (_ITEM, "item_id"),
    (_TIME, "computed_at"),
    (_VECTOR, "embedding"),
    (_TIER, "tier"),
    (_SIMILARITY, "similarity"),
    (_COUNT, "neighbor_count"),
    (_NEIGHBORS, "neighbor_ids"),
    (_COSINES, "neighbor_similarities"),
)


class Compiled:
    """answer() for one snapshot. The first in a process compiles the loop, or loads it from numba's cache on disk."""

    def __init__(self, tables: Tables) -> None:
        self._tables, manifest, policy = tables, tables.manifest, tables.manifest.policy
        self._settings = np.array(
            [
                manifest.shards,
                manifest.neighbors,
                manifest.width,
                manifest.dim,
                manifest.codec == "float16",
                tables.zero,
                policy.ttl_micros,
                policy.max_user_age_micros,
                tables.pairs.longest_bucket,
                tables.users.longest_bucket,
            ],
            np.int64,
        )
        self._min_similarity = np.float32(policy.min_similarity)
        self._pairs, self._users = _layout(tables.pairs), _layout(tables.users)

    def answer(self, users: Int64, items: Int64, at: Int64, out: Lookup) -> None:
        """As answer.answer."""
        tables = self._tables
        whole = _answer(
            _writable(users),
            _writable(items),
            _writable(at),
            self._settings,
            self._min_similarity,
            tables.ranks,
            tables.codes,
            tables.held,
            self._pairs,
            self._users,
            tables.views,
            (out.embedding, out.embedding.view(np.int32), out.tier, out.age_seconds, out.similarity),
            (
                out.user_embedding,
                out.user_embedding.view(np.int32),
                out.user_tier,
                out.user_age_seconds,
                out.user_similarity,
            ),
        )
        if not whole:
            raise SnapshotError("the bucket offsets are damaged; verify the snapshot")


def _writable(values: Int64) -> Int64:
    """A copy if the array is read-only: to numba that is another type, for which it would compile for seconds."""
    return values if values.flags.writeable else values.copy()


def _layout(table: Table) -> Int64:
    layout = np.zeros((len(table.rows), 12), np.int64)
    layout[:, _BUCKETS], layout[:, _OFFSETS], layout[:, _ROWS] = table.buckets, table.offset_starts, table.rows
    for place, name in _PLACES:
        if name in table.starts:
            layout[:, place] = table.starts[name]
    return layout


def _emit_prefetch(_: Any, array: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [address, number(0), number(3), number(1)])  # to read, soon, data
        return context.get_dummy_value()

    return types.void(array, place), generate


# _prefetch(array, place) asks for the cache line of array[place]. Any place may be named, even one outside the array.
_prefetch: Any = intrinsic(_emit_prefetch)


@njit(nogil=True, cache=True, inline="always")
def _prefetch_vector(place, settings, views):  # type: ignore[no-untyped-def]
    width = settings[2]
    for byte in range(0, width, 64):
        _prefetch(views[4], place + byte)
    _prefetch(views[4], place + width - 1)


@njit(nogil=True, cache=True, inline="always")
def _hash(value, start):  # type: ignore[no-untyped-def]
    key = np.uint64(value) * _P2
    key = ((key << _31) | (key >> _33)) * _P1
    key = key ^ start
    key = ((key << _27) | (key >> _37)) * _P1 + _P4
    key = (key ^ (key >> _33)) * _P2
    key = (key ^ (key >> _29)) * _P3
    return key ^ (key >> _32)


@njit(nogil=True, cache=True, inline="always")
def _bucket(hash_, buckets):  # type: ignore[no-untyped-def]
    return np.int64(((hash_ >> _32) * np.uint64(buckets)) >> _32)


@njit(nogil=True, cache=True)
def _write(rank, place, age, similarity, codes, settings, views, out):  # type: ignore[no-untyped-def]
    vectors, bits, tier, seconds, near = out
    _, _, _, halves, bytes_ = views
    dim, is_half = settings[3], settings[4]
    scale_bits = np.zeros(1, np.uint32)
    scale = scale_bits.view(np.float32)
    ahead = 16
    for i in range(min(ahead, len(rank))):
        _prefetch_vector(place[i], settings, views)
    for i in range(len(rank)):
        if i + ahead < len(rank):
            _prefetch_vector(place[i + ahead], settings, views)
        tier[i] = codes[rank[i]]
        near[i] = similarity[i]
        seconds[i] = min(age[i] // 1_000_000, _MOST_SECONDS) if rank[i] != NEVER else -1
        p = place[i]
        if rank[i] == NEVER:
            vectors[i, :] = 0
        elif is_half:
            # Slices, since an index that may be negative keeps a loop from being vectorized.
            stored, raw, vector = halves[p >> 1 : (p >> 1) + dim], bits[i], vectors[i]
            for j in range(dim):
                raw[j] = (np.int32(stored[j]) << 13) & _MASK
            for j in range(dim):
                vector[j] *= _SCALE
        else:
            word = np.uint32(0)
            for j in range(4):
                word |= np.uint32(bytes_[p + j]) << np.uint32(8 * j)
            scale_bits[0] = word
            for j in range(dim):
                vectors[i, j] = np.float32(np.int8(bytes_[p + 4 + j])) * scale[0]


@njit(nogil=True, cache=True)
def _answer(  # type: ignore[no-untyped-def]
    users, items, at, settings, min_similarity, ranks, codes, held, pairs, owners, views, out, out_user
):
    """Fills out and out_user; False if a bucket is not what the manifest says."""
    offsets, words, floats, _, bytes_ = views
    shards, slots, width, zero = np.uint64(settings[0]), settings[1], settings[2], settings[5]
    ttl, max_user_age = settings[6], settings[7]
    longest_pairs, longest_users = settings[8], settings[9]
    count = len(users)
    hashes = np.empty(count, np.uint64)
    shard = np.empty(count, np.int64)
    low = np.empty(count, np.int64)
    high = np.empty(count, np.int64)
    rank = np.full(count, NEVER, np.uint8)
    place = np.full(count, zero, np.int64)
    age = np.full(count, -1, np.int64)
    similarity = np.zeros(count, np.float32)
    for i in range(count):
        hashes[i] = _hash(users[i], _SEEDED)
        shard[i] = np.int64((hashes[i] & _LOW) % shards)

    if ranks[PAIR] != NEVER:
        for i in range(count):
            s = shard[i]
            low[i] = pairs[s, _OFFSETS] + _bucket(_hash(items[i], hashes[i] + _LENGTH), pairs[s, _BUCKETS])
            _prefetch(offsets, low[i])
        for i in range(count):
            s, b = shard[i], low[i]
            low[i], high[i] = offsets[b], offsets[b + 1]
            _prefetch(words, pairs[s, _USER] + low[i])
            _prefetch(words, pairs[s, _ITEM] + low[i])
        for i in range(count):
            if low[i] > high[i] or high[i] - low[i] > longest_pairs or high[i] > pairs[shard[i], _ROWS]:
                return False
        # Most buckets have one row. Reading it needs no branch, so many reads are under way at once; a branch that
        # waits for memory and then was guessed wrong would stop them all.
        first_user, first_item = np.empty(count, np.int64), np.empty(count, np.int64)
        for i in range(count):
            s = shard[i]
            first_user[i], first_item[i] = words[pairs[s, _USER] + low[i]], words[pairs[s, _ITEM] + low[i]]
        for i in range(count):
            s, row = shard[i], np.int64(-1)
            if low[i] < high[i]:
                if first_user[i] == users[i] and first_item[i] == items[i]:
                    row = low[i]
                else:
                    for r in range(low[i] + 1, high[i]):
                        if words[pairs[s, _USER] + r] == users[i] and words[pairs[s, _ITEM] + r] == items[i]:
                            row = np.int64(r)
            low[i] = row
            if row >= 0:
                _prefetch(words, pairs[s, _TIME] + row)
        for i in range(count):
            if low[i] >= 0:
                passed = at[i] - words[pairs[shard[i], _TIME] + low[i]]
                if 0 <= passed < ttl:
                    rank[i], age[i], similarity[i] = ranks[PAIR], passed, 1
                    place[i] = pairs[shard[i], _VECTOR] + low[i] * width

    both = out_user[0].shape[1] > 0
    user_rank = np.full(count if both else 0, NEVER, np.uint8)
    user_place = np.full(count if both else 0, zero, np.int64)
    user_age = np.full(count if both else 0, -1, np.int64)
    user_similarity = np.zeros(count if both else 0, np.float32)
    first = min(min(ranks[USER_MEAN], ranks[NEIGHBOR_MEAN]), min(ranks[COLD], ranks[NEIGHBOR_PAIR]))
    asking = np.empty(count, np.int64)
    asked = 0
    for i in range(count):
        if both or rank[i] > first:
            asking[asked] = i
            asked += 1
    for k in range(asked):
        i = asking[k]
        low[k] = owners[shard[i], _OFFSETS] + _bucket(hashes[i], owners[shard[i], _BUCKETS])
        _prefetch(offsets, low[k])
    for k in range(asked):
        b = low[k]
        low[k], high[k] = offsets[b], offsets[b + 1]
        _prefetch(words, owners[shard[asking[k]], _USER] + low[k])
    for k in range(asked):
        if low[k] > high[k] or high[k] - low[k] > longest_users or high[k] > owners[shard[asking[k]], _ROWS]:
            return False
    for k in range(asked):
        i = asking[k]
        s, row = shard[i], np.int64(-1)
        for r in range(low[k], high[k]):
            if words[owners[s, _USER] + r] == users[i]:
                row = np.int64(r)
        low[k] = row
        if row >= 0:
            _prefetch(words, owners[s, _TIME] + row)
            _prefetch(floats, owners[s, _SIMILARITY] + row)
            _prefetch(bytes_, owners[s, _TIER] + row)
            _prefetch(bytes_, owners[s, _COUNT] + row)
    cells = np.int64(0)
    for k in range(asked):
        i, row = asking[k], low[k]
        if row < 0:
            continue
        s = shard[i]
        passed = at[i] - words[owners[s, _TIME] + row]
        near = floats[owners[s, _SIMILARITY] + row]
        tier = bytes_[owners[s, _TIER] + row]
        if 0 <= passed < max_user_age and (
            tier in (USER_MEAN, COLD) or (tier == NEIGHBOR_MEAN and near >= min_similarity)
        ):
            where = owners[s, _VECTOR] + row * width
            if ranks[tier] < rank[i]:
                rank[i], place[i], age[i], similarity[i] = ranks[tier], where, passed, near
            if both and ranks[tier] != NEVER:
                user_rank[i], user_place[i], user_age[i], user_similarity[i] = ranks[tier], where, passed, near
        if rank[i] > ranks[NEIGHBOR_PAIR]:
            cells += min(slots, np.int64(bytes_[owners[s, _COUNT] + row]))
            _prefetch(floats, owners[s, _COSINES] + row * slots)
            _prefetch(words, owners[s, _NEIGHBORS] + row * slots)

    # A cell is one neighbour of one key. They too are read in passes, and the first usable one of a key is its best.
    cell_key, cell_shard = np.empty(cells, np.int64), np.empty(cells, np.int64)
    cell_user, cell_near = np.empty(cells, np.int64), np.empty(cells, np.float32)
    cells = np.int64(0)
    for k in range(asked):
        i, row = asking[k], low[k]
        if row >= 0 and rank[i] > ranks[NEIGHBOR_PAIR]:
            s = shard[i]
            for slot in range(min(slots, np.int64(bytes_[owners[s, _COUNT] + row]))):
                near = floats[owners[s, _COSINES] + row * slots + slot]
                if near >= min_similarity:
                    cell_key[cells], cell_near[cells] = i, near
                    cell_user[cells] = words[owners[s, _NEIGHBORS] + row * slots + slot]
                    cells += 1
    begin, end = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
    for c in range(cells):
        its_hash = _hash(cell_user[c], _SEEDED)
        o = np.int64((its_hash & _LOW) % shards)
        cell_shard[c] = o
        if held[o]:
            b = pairs[o, _OFFSETS] + _bucket(_hash(items[cell_key[c]], its_hash + _LENGTH), pairs[o, _BUCKETS])
            begin[c], end[c] = b, b + 1
            _prefetch(offsets, b)
    for c in range(cells):
        if held[cell_shard[c]]:
            begin[c], end[c] = offsets[begin[c]], offsets[end[c]]
            _prefetch(words, pairs[cell_shard[c], _USER] + begin[c])
            _prefetch(words, pairs[cell_shard[c], _ITEM] + begin[c])
    for c in range(cells):
        if begin[c] > end[c] or end[c] - begin[c] > longest_pairs or end[c] > pairs[cell_shard[c], _ROWS]:
            return False
    first_user, first_item = np.empty(cells, np.int64), np.empty(cells, np.int64)
    for c in range(cells):
        o = cell_shard[c]
        first_user[c], first_item[c] = words[pairs[o, _USER] + begin[c]], words[pairs[o, _ITEM] + begin[c]]
    for c in range(cells):
        i, o, found = cell_key[c], cell_shard[c], np.int64(-1)
        if begin[c] < end[c] and rank[i] > ranks[NEIGHBOR_PAIR]:
            if first_user[c] == cell_user[c] and first_item[c] == items[i]:
                found = begin[c]
            else:
                for r in range(begin[c] + 1, end[c]):
                    if words[pairs[o, _USER] + r] == cell_user[c] and words[pairs[o, _ITEM] + r] == items[i]:
                        found = np.int64(r)
        if found >= 0:
            passed = at[i] - words[pairs[o, _TIME] + found]
            if 0 <= passed < ttl:
                rank[i], age[i], similarity[i] = ranks[NEIGHBOR_PAIR], passed, cell_near[c]
                place[i] = pairs[o, _VECTOR] + found * width

    _write(rank, place, age, similarity, codes, settings, views, out)
    if both:
        _write(user_rank, user_place, user_age, user_similarity, codes, settings, views, out_user)
    else:
        out_user[2][:] = 0
        out_user[3][:] = -1
        out_user[4][:] = 0
    return True
