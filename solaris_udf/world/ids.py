"""Numbers to ids and back: 64-bit, spread over the whole range (half of them negative), without collisions.

Real logs have such ids, and they show at once where an id passes through a float.
"""

import numpy as np
import numpy.typing as npt

from solaris_udf.world.draws import Int64, UInt64, key, mix, unmix

INDEX_BITS, CELL_BITS = 10, 20
MAX_REQUESTS = 1 << (INDEX_BITS - 1)  # of one user in one hour; the other half is for rows with a broken clock
_SALTS = {kind: int(key(0, f"ids/{kind}")[0]) for kind in ("user", "item", "advertiser")}
_HEX = np.frombuffer(b"".join(f"{byte:02x}".encode() for byte in range(256)), dtype=np.uint8).reshape(256, 2)


def to_ids(kind: str, numbers: npt.ArrayLike) -> Int64:
    """The ids of the numbers (>= 0) of kind user, item or advertiser; the same in every world."""
    words = np.atleast_1d(np.asarray(numbers, dtype=np.int64)).view(np.uint64)
    return mix(words ^ np.uint64(_SALTS[kind])).view(np.int64)


def to_numbers(kind: str, ids: npt.ArrayLike) -> Int64:
    """The inverse of to_ids."""
    words = np.atleast_1d(np.asarray(ids, dtype=np.int64)).view(np.uint64)
    return (unmix(words) ^ np.uint64(_SALTS[kind])).view(np.int64)


def request_words(seed: int, users: Int64, cell: int, index: Int64) -> UInt64:
    """One distinct word a (user number, hour, index within the hour) of a seed."""
    packed = (users << np.int64(CELL_BITS + INDEX_BITS)) | np.int64(cell << INDEX_BITS) | index
    return mix(packed.view(np.uint64) ^ key(seed, "requests"))


def broken_clock(words: UInt64) -> UInt64:
    """The word of a row that is in no request: as distinct as the request it was made from."""
    # request_words' last step is a bijection, so a flipped bit before it gives a word that no request has.
    return mix(unmix(words) ^ np.uint64(1 << (INDEX_BITS - 1)))


def hex_bytes(words: UInt64) -> npt.NDArray[np.uint8]:
    """16 ASCII hex digits a word: [n] -> [n, 16]."""
    raw = np.ascontiguousarray(words.astype(">u8")).view(np.uint8).reshape(len(words), 8)
    return _HEX[raw].reshape(len(words), 16)
