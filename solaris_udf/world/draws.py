"""Random numbers by address: each is a hash of (seed, stream, counters); who asks, and in what order, does not matter.

That is what makes a world independent of how its users and its time are cut, and it is vectorized over users. The hash
is the finalizer of SplitMix64 (Steele, Lea, Flood 2014; Stafford's variant 13), once a counter.
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_A_INVERSE, _B_INVERSE = np.uint64(pow(int(_A), -1, 1 << 64)), np.uint64(pow(int(_B), -1, 1 << 64))


def mix(values: UInt64) -> UInt64:
    """A bijection of 64-bit words that looks random. Any shape but 0-d."""
    x = (values ^ (values >> np.uint64(30))) * _A
    x = (x ^ (x >> np.uint64(27))) * _B
    out: UInt64 = x ^ (x >> np.uint64(31))
    return out


def unmix(values: UInt64) -> UInt64:
    """The inverse of mix."""
    x = _unshift(values, 31) * _B_INVERSE
    x = _unshift(x, 27) * _A_INVERSE
    return _unshift(x, 30)


def _unshift(values: UInt64, bits: int) -> UInt64:
    x = values ^ (values >> np.uint64(bits))
    out: UInt64 = values ^ (x >> np.uint64(bits))
    return out


def key(seed: int, stream: str) -> UInt64:
    """The root [1] of a stream of draws."""
    root = np.array([seed & _MASK], dtype=np.uint64)
    for start in range(0, len(stream), 8):  # ASCII, so the counters are positive
        root = fold(root, int.from_bytes(stream[start : start + 8].encode("ascii"), "little"))
    return root


def fold(parent: UInt64, counter: npt.ArrayLike) -> UInt64:
    """The key of each counter (integers) below a key; the two broadcast. A key is also a draw of 64 random bits."""
    words = np.atleast_1d(np.asarray(counter, dtype=np.int64)).view(np.uint64)
    return mix(mix(parent + _GOLDEN) ^ words * _GOLDEN)


def uniform(keys: UInt64) -> Float64:
    """Uniform in (0, 1), neither end."""
    out: Float64 = ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return out


def normal(keys: UInt64) -> Float64:
    """Standard normal (Box and Muller, both halves of the word)."""
    radius = ((keys >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = (keys & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    out: Float64 = np.sqrt(-2.0 * np.log(radius)) * np.cos(angle)
    return out


def poisson(keys: UInt64, rate: Float64, most: int) -> Int64:
    """Poisson counts of the rates, at most `most`, by inversion. Shapes [n]."""
    left = uniform(keys)
    term = np.exp(-rate)
    count = np.zeros(len(rate), dtype=np.int64)
    active = np.flatnonzero(left >= term)
    left, term, rate = left[active], term[active], rate[active]
    for k in range(1, most + 1):
        if not len(active):
            break
        left = left - term
        term = term * rate / k
        count[active] = k
        more = left >= term
        active, left, term, rate = active[more], left[more], term[more], rate[more]
    return count


def choose(keys: UInt64, size: int) -> Int64:
    """`size` columns of each row without replacement, ascending: [n, width] keys -> [n, min(size, width)]."""
    width = keys.shape[1]
    if size >= width:
        return np.broadcast_to(np.arange(width), keys.shape).copy()
    out: Int64 = np.sort(np.argpartition(keys, size - 1, axis=1)[:, :size], axis=1)
    return out
