"""How an embedding is stored: as bytes, half the size of float32 or less, and much faster than array<float>.

float16: d little-endian halves. int8: one little-endian float32 scale, then d signed bytes; value = scale * byte.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CODECS = ("float16", "int8")
Float32 = npt.NDArray[np.float32]


def bytes_per_vector(dim: int, codec: str) -> int:
    """Stored length of one vector of dim dimensions."""
    return {"float16": 2 * dim, "int8": 4 + dim}[_known(codec)]


def encode(vectors: npt.ArrayLike, codec: str = "float16") -> pa.Array:
    """Encodes float32 vectors [n, d], all finite, as a pyarrow binary array of length n.

    Raises ValueError for a NaN or an Inf, also one that appears only when rounded to float16 (|x| >= 65520).
    """
    values = np.ascontiguousarray(vectors, dtype=np.float32)
    if values.ndim != 2:
        raise ValueError(f"vectors must be [n, d], not {values.shape}")
    count, dim = values.shape
    if _known(codec) == "float16":
        with np.errstate(over="ignore"):
            packed = values.astype("<f2")
        # All exponent bits set: a NaN or an Inf. np.isfinite is several times slower on halves.
        finite = not bool(((packed.view("<u2") & 0x7C00) == 0x7C00).any())
        raw = packed.view(np.uint8).reshape(count, 2 * dim)
    else:
        finite = bool(np.isfinite(values).all())
        scale = np.maximum(np.abs(values).max(axis=1, initial=0.0), np.finfo(np.float32).tiny) / 127
        packed_bytes = np.rint(values / scale[:, None]).clip(-127, 127).astype(np.int8) if finite else None
        if packed_bytes is not None:
            raw = np.concatenate(
                [scale.astype("<f4").view(np.uint8).reshape(count, 4), packed_bytes.view(np.uint8)], axis=1
            )
    if not finite:
        raise ValueError(f"a vector is not finite as {codec}; reject such rows before encoding")
    width = raw.shape[1]
    offsets = np.arange(count + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(raw.tobytes())])


def decode(packed: pa.Array | pa.ChunkedArray | Sequence[bytes], codec: str = "float16") -> Float32:
    """Decodes stored vectors of one length to float32 [n, d]. No nulls. [0, 0] for none.

    Raises ValueError if lengths differ or do not fit the codec.
    """
    _known(codec)
    array: Any = packed if isinstance(packed, pa.Array | pa.ChunkedArray) else pa.array(packed, type=pa.binary())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise ValueError("a stored vector is null")
    count = len(array)
    if count == 0:
        return np.zeros((0, 0), dtype=np.float32)
    wide = pa.types.is_large_binary(array.type)
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64 if wide else np.int32)[
        array.offset : array.offset + count + 1
    ]
    widths = np.diff(offsets)
    if (widths != widths[0]).any():
        raise ValueError(f"stored vectors differ in length: {sorted(set(widths.tolist()))[:5]} bytes")
    width = int(widths[0])
    data = array.buffers()[2]
    raw = (
        np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]].reshape(count, width)
        if width
        else np.zeros((count, 0), np.uint8)
    )
    if codec == "float16":
        if width % 2:
            raise ValueError(f"a float16 vector of {width} bytes")
        return np.ascontiguousarray(raw).view("<f2").astype(np.float32)
    if width < 4:
        raise ValueError(f"an int8 vector of {width} bytes has no scale")
    scale = np.ascontiguousarray(raw[:, :4]).view("<f4").astype(np.float32)
    return np.ascontiguousarray(raw[:, 4:]).view(np.int8).astype(np.float32) * scale


def _known(codec: str) -> str:
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; codecs: {', '.join(CODECS)}")
    return codec
