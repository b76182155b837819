"""The hash of the format: XXH64 of an id's eight little-endian bytes.

It is what Spark SQL calls xxhash64 (seed 42), so that an export is partitioned and sorted without a UDF, and every
language has a library for it. A user's hash is XXH64(user_id, seed 42); a pair's is XXH64(item_id, seed = the user's
hash), in Spark SQL `xxhash64(user_id, item_id)`.
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

SEED = 42
_MASK = (1 << 64) - 1
_PRIME1, _PRIME2, _PRIME3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME4, _PRIME5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_P1, _P2, _P3, _P4 = (np.uint64(prime) for prime in (_PRIME1, _PRIME2, _PRIME3, _PRIME4))
_LENGTH = np.uint64((_PRIME5 + 8) & _MASK)
_SEEDED = np.uint64((SEED + _PRIME5 + 8) & _MASK)
_27, _29, _31, _32, _33, _37 = (np.uint64(bits) for bits in (27, 29, 31, 32, 33, 37))
_LOW = np.uint64(0xFFFFFFFF)


def _hash(values: Int64, start: np.uint64 | UInt64) -> UInt64:
    key: UInt64 = values.view(np.uint64) * _P2
    spare = key >> _33
    key <<= _31
    key |= spare
    key *= _P1
    key ^= start
    np.right_shift(key, _37, out=spare)
    key <<= _27
    key |= spare
    key *= _P1
    key += _P4
    np.right_shift(key, _33, out=spare)
    key ^= spare
    key *= _P2
    np.right_shift(key, _29, out=spare)
    key ^= spare
    key *= _P3
    np.right_shift(key, _32, out=spare)
    key ^= spare
    return key


def hash_users(user_ids: Int64) -> UInt64:
    """The hash of each user, uint64 [n] from contiguous int64 [n]."""
    return _hash(user_ids, _SEEDED)


def hash_pairs(user_hashes: UInt64, item_ids: Int64) -> UInt64:
    """The hash of each pair, uint64 [n], from hash_users of its user and its item."""
    return _hash(item_ids, user_hashes + _LENGTH)


def shard_of(user_hashes: UInt64, shards: int) -> Int64:
    """The shard of each user: the low 32 bits of the hash, modulo the number of shards. int64 [n]."""
    return ((user_hashes & _LOW) % np.uint64(shards)).astype(np.int64)


def bucket_of(hashes: UInt64, buckets: int) -> Int64:
    """The bucket of each hash: its high 32 bits scaled to [0, buckets). Rises with the hash. int64 [n]."""
    return (((hashes >> _32) * np.uint64(buckets)) >> _32).astype(np.int64)
