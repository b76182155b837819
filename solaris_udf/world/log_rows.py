"""Simulated rows as a raw log has them: ids, strings, arrival times, and the faults that real logs have."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.world.draws import Float64, Int64, UInt64, fold, key, uniform
from solaris_udf.world.ids import broken_clock, hex_bytes, to_ids
from solaris_udf.world.items import Items
from solaris_udf.world.parameters import HOUR, SURFACES, Rules
from solaris_udf.world.simulate import Rows

TIME = pa.timestamp("us", tz="UTC")
ORIGINAL, DUPLICATE, FUTURE = 0, 1, 2
# Everything about a row, from which the log, its later labels and the truth are selected.
LOG_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("event_time", TIME),
        ("arrived_at", TIME),
        ("user_id", pa.int64()),
        ("item_id", pa.int64()),
        ("surface", pa.string()),
        ("position", pa.int32()),
        ("shown", pa.bool_()),
        ("clicked", pa.bool_()),
        ("click_probability", pa.float64()),
        ("conversion_probability", pa.float64()),
        ("converted_at", TIME),
        ("conversion_arrived_at", TIME),  # null: no conversion
        ("late", pa.bool_()),
        ("kind", pa.int8()),
    ]
)
ITEM_SCHEMA = pa.schema(
    [
        ("item_id", pa.int64()),
        ("category_id", pa.int64()),
        ("advertiser_id", pa.int64()),
        ("created_at", TIME),
        ("bid", pa.float64()),
        ("objective", pa.string()),
        ("features", pa.list_(pa.float32())),
    ]
)
_SECOND = 1_000_000
_YEAR_2099 = 4_070_908_800 * _SECOND
# Rows of one request reach the log together, within seconds; a late row by itself, after a minute at least.
_PROMPT_MAX, _LATE_MIN = 5 * _SECOND, 60 * _SECOND


def log_batch(rows: Rows, rules: Rules, seed: int) -> pa.RecordBatch:
    """The rows in LOG_SCHEMA: first the originals, then duplicates (same request and item, arriving later), then rows
    whose clock is wrong (a request id of their own, event_time after arrived_at). Deterministic per row."""
    own = fold(fold(key(seed, "log"), rows.request.view(np.int64)), rows.item)
    late = uniform(fold(own, 0)) < rules.late_rate
    prompt = _span(fold(fold(key(seed, "prompt"), rows.request.view(np.int64)), 0), 0, _PROMPT_MAX)
    slow = _span(fold(own, 1), _LATE_MIN, int(rules.late_max_hours * HOUR))
    arrived = rows.event_time + np.where(late, slow, prompt)

    # Exponential, cut at its maximum by drawing from the part below it. It happens before it is reported.
    within = 1.0 - np.exp(-rules.conversion_max_hours / rules.conversion_mean_hours)
    delay = -rules.conversion_mean_hours * np.log1p(-within * uniform(fold(own, 2)))
    reported = rows.event_time + (delay * HOUR).astype(np.int64)
    happened = rows.event_time + (delay * HOUR * uniform(fold(own, 3))).astype(np.int64)

    again = np.flatnonzero(uniform(fold(own, 4)) < rules.duplicate_rate)
    wrong = np.flatnonzero(uniform(fold(own, 5)) < rules.future_rate)
    pick = np.concatenate([np.arange(len(rows)), again, wrong])
    kind = np.repeat(np.array([ORIGINAL, DUPLICATE, FUTURE], dtype=np.int8), [len(rows), len(again), len(wrong)])
    request, event_time, arrived = rows.request[pick], rows.event_time[pick], arrived[pick]
    duplicate, future = kind == DUPLICATE, kind == FUTURE
    arrived[duplicate] += _span(fold(own[again], 6), _SECOND, HOUR)
    request[future] = broken_clock(request[future])
    # Half of the clocks are a century wrong, the others by hours or weeks.
    far = uniform(fold(own[wrong], 7)) < 0.5
    event_time[future] = np.where(far, _YEAR_2099, arrived[future]) + _span(fold(own[wrong], 8), HOUR, 30 * 24 * HOUR)
    unconverted = ~(rows.converted[pick] & (kind == ORIGINAL))
    surfaces = pa.DictionaryArray.from_arrays(pa.array(rows.surface[pick].astype(np.int8)), pa.array(SURFACES))
    return pa.RecordBatch.from_arrays(
        [
            _strings(request),
            _times(event_time),
            _times(arrived),
            pa.array(to_ids("user", rows.user[pick])),
            pa.array(to_ids("item", rows.item[pick])),
            surfaces.cast(pa.string()),
            pa.array(rows.position[pick].astype(np.int32)),
            pa.array(rows.shown[pick]),
            pa.array(rows.clicked[pick]),
            pa.array(rows.click_probability[pick]),
            pa.array(rows.conversion_probability[pick]),
            _times(happened[pick], unconverted),
            _times(reported[pick], unconverted),
            pa.array(late[pick] & (kind == ORIGINAL)),
            pa.array(kind),
        ],
        schema=LOG_SCHEMA,
    )


def item_batches(items: Items, until: int, size: int = 50_000) -> Iterator[pa.RecordBatch]:
    """All campaigns that start before a time (microseconds UTC) in ITEM_SCHEMA, by number."""
    numbers = np.flatnonzero(items.start < until)
    for first in range(0, len(numbers), size):
        part = numbers[first : first + size]
        features = items.features[part]
        offsets = pa.array(np.arange(len(part) + 1, dtype=np.int32) * features.shape[1])
        objectives = np.where(items.pays_for_conversions[part], "conversion", "click")
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(to_ids("item", part)),
                pa.array(items.category[part]),
                pa.array(to_ids("advertiser", items.advertiser[part])),
                _times(items.start[part]),
                pa.array(items.bid[part]),
                pa.array(objectives, type=pa.string()),
                pa.ListArray.from_arrays(offsets, pa.array(features.ravel())),
            ],
            schema=ITEM_SCHEMA,
        )


def _span(keys: UInt64, low: int, high: int) -> Int64:
    chances: Float64 = uniform(keys)
    return low + (chances * (high - low)).astype(np.int64)


def _times(values: Int64, nulls: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    return pa.array(values, type=pa.int64(), mask=nulls).cast(TIME)


def _strings(words: UInt64) -> pa.Array:
    raw = hex_bytes(words)
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * raw.shape[1]
    return pa.Array.from_buffers(pa.string(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(raw.tobytes())])
