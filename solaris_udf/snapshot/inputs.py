"""Checking what a caller hands to a lookup: ids and times come out as int64 arrays, or a clear error does."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot.errors import SnapshotError

Int64 = npt.NDArray[np.int64]
_LIMIT = 1 << 62


def as_ids(values: Any, name: str) -> Int64:
    """int64 [n] from any array or list of integers.

    Raises SnapshotError for floats (also whole ones: an id that was once a float may have lost digits), booleans,
    nulls, numbers beyond 64 signed bits, and anything that is not one-dimensional.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise SnapshotError(f"{name} can't be read as an array of integers: {error}") from None
    if array.ndim != 1:
        raise SnapshotError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size == 0 and array.dtype.kind in "fO":
        return np.zeros(0, np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        lossy = array.dtype.kind == "f"
        hint = ": ids that pass through floats lose digits (a nullable column? use Int64)" if lossy else ""
        raise SnapshotError(f"{name} must be integers, not {array.dtype}{hint}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise SnapshotError(f"{name} holds {int(array.max())}, which is beyond a signed 64-bit integer")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_micros(at: Any, count: int) -> Int64:
    """int64 [count], microseconds since 1970 UTC, from a time or an array of times; None is now.

    A time is an int64 of microseconds, a datetime64 (taken as UTC) or a datetime with a zone. Raises SnapshotError for
    anything else, for NaT, and for an array of another length.
    """
    if at is None:
        at = datetime.now(UTC)
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise SnapshotError(f"at {at.isoformat()} has no time zone; use UTC")
        at = np.datetime64(at.astimezone(UTC).replace(tzinfo=None), "us")
    array = np.asarray(at)
    if array.dtype.kind == "M":
        if np.isnat(array).any():
            raise SnapshotError("at holds a missing time (NaT)")
        array = array.astype("datetime64[us]").astype(np.int64)
    elif array.size == 0 and count == 0:
        return np.zeros(0, np.int64)
    elif array.dtype.kind not in "iu":
        raise SnapshotError(f"at must be times (datetime64, aware datetime) or integer microseconds, not {array.dtype}")
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise SnapshotError(f"at has shape {array.shape}, must be one time or one for each of the {count} keys")
    if array.size and (int(array.min()) <= -_LIMIT or int(array.max()) >= _LIMIT):
        raise SnapshotError("at is out of range; give microseconds since 1970 UTC")
    if array.ndim == 0:
        return np.full(count, array, np.int64)
    return np.ascontiguousarray(array, dtype=np.int64)
