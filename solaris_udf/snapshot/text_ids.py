"""Ids of datasets whose ids are text (`[ids] user = "string"` in the mapping): what ingest_log made of them."""

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.hashing import _MASK, SEED
from solaris_udf.snapshot.hashing import _PRIME1 as _P1
from solaris_udf.snapshot.hashing import _PRIME2 as _P2
from solaris_udf.snapshot.hashing import _PRIME3 as _P3
from solaris_udf.snapshot.hashing import _PRIME4 as _P4
from solaris_udf.snapshot.hashing import _PRIME5 as _P5


def text_ids(texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """The ids of texts, int64 [n]: XXH64 of their UTF-8 bytes, seed 42, as Spark SQL's `xxhash64(text)`.

    The text counts as it stands: spaces and case matter. Takes a few microseconds an id; a ranker with thousands of new
    texts a request may call the xxhash package's `xxh64_intdigest(text, seed=42)` instead, which gives the same bits.
    """
    return np.fromiter((_xxh64(text.encode()) for text in texts), np.uint64).view(np.int64)


def _xxh64(data: bytes) -> int:
    """XXH64 with the seed of the format (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    size, place = len(data), 0
    if size >= 32:
        lanes = [(SEED + _P1 + _P2) & _MASK, (SEED + _P2) & _MASK, SEED, (SEED - _P1) & _MASK]
        while place + 32 <= size:
            words = struct.unpack_from("<4Q", data, place)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            place += 32
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        value = SEED + _P5
    value = (value + size) & _MASK
    while place + 8 <= size:
        value = (_rotate(value ^ _round(0, struct.unpack_from("<Q", data, place)[0]), 27) * _P1 + _P4) & _MASK
        place += 8
    if place + 4 <= size:
        value ^= struct.unpack_from("<I", data, place)[0] * _P1 & _MASK
        value = (_rotate(value, 23) * _P2 + _P3) & _MASK
        place += 4
    for byte in data[place:]:
        value = _rotate(value ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    value = (value ^ value >> 33) * _P2 & _MASK
    value = (value ^ value >> 29) * _P3 & _MASK
    return value ^ value >> 32


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & _MASK
