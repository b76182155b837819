"""The item table as an Arrow file that every worker maps into memory: shared by all workers of a host, never copied."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UNKNOWN_TIME = np.iinfo(np.int64).min


class ItemTable:
    """Items sorted by id. `rows_of` finds them by binary search; the getters take those rows, -1 giving the defaults:
    category 0, advertiser 0, creation time unknown, dense features 0."""

    def __init__(self, item_id: Int64, category: Int64, advertiser: Int64, created: Int64, dense: Float32) -> None:
        self._item_id = item_id
        self._category = category
        self._advertiser = advertiser
        self._created = created
        self._dense = dense

    @classmethod
    def open(cls, path: str | Path) -> "ItemTable":
        """Maps a file that `write_item_file` wrote. Opening reads its header only."""
        # The arrays below point into the mapping and keep it alive.
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        width = batch.schema.field("dense").type.list_size
        dense = batch["dense"].flatten().to_numpy(zero_copy_only=True).reshape(len(batch), width)
        names = ("item_id", "category", "advertiser", "created")
        columns = [batch[name].to_numpy(zero_copy_only=True) for name in names]
        return cls(columns[0], columns[1], columns[2], columns[3], dense)

    def __len__(self) -> int:
        return len(self._item_id)

    @property
    def dense_width(self) -> int:
        return int(self._dense.shape[1])

    def rows_of(self, item_ids: Int64) -> Int64:
        """Row of each item id, -1 where unknown. [n] -> [n]."""
        if not len(self):
            return np.full(len(item_ids), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._item_id, item_ids), len(self) - 1)
        return np.where(self._item_id[places] == item_ids, places, -1)

    def category(self, rows: Int64) -> Int64:
        return self._pick(self._category, rows, 0)

    def advertiser(self, rows: Int64) -> Int64:
        return self._pick(self._advertiser, rows, 0)

    def age_hours(self, rows: Int64, at: Int64) -> Float32:
        """Hours from each item's creation to at (micros UTC); 0 where unknown or not yet created."""
        created = self._pick(self._created, rows, UNKNOWN_TIME)
        hours = (at - np.where(created == UNKNOWN_TIME, at, created)) / 3.6e9
        return np.maximum(hours, 0).astype(np.float32)

    def dense(self, rows: Int64) -> Float32:
        """[n] -> [n, D]."""
        found = self._dense[np.maximum(rows, 0)] if len(self) else np.zeros((len(rows), self.dense_width), np.float32)
        found[rows < 0] = 0
        return found

    def _pick(self, values: Int64, rows: Int64, default: int) -> Int64:
        if not len(self):
            return np.full(len(rows), default, dtype=np.int64)
        return np.where(rows >= 0, values[np.maximum(rows, 0)], default)


def write_item_file(batches: Iterable[pa.RecordBatch], path: Path) -> None:
    """Writes the item file from batches of (item_id, category_id, advertiser_id, created_at, features), atomically.

    One row per item, in any order. Raises ValueError if feature vectors differ in length.
    """
    table = pa.Table.from_batches(list(batches), schema=ITEM_SCHEMA).sort_by("item_id").combine_chunks()
    features = table["features"].combine_chunks()
    widths = pc.unique(pc.list_value_length(features).drop_null()).to_pylist()
    if len(widths) > 1:
        raise ValueError(f"items have feature vectors of different lengths: {sorted(widths)[:5]}; they must be equal")
    width = widths[0] if widths else 0
    dense = np.zeros((len(table), width), dtype=np.float32)
    present = np.asarray(features.is_valid())
    values = pc.fill_null(features.flatten(), 0.0).to_numpy(zero_copy_only=False).astype(np.float32)
    dense[present] = values.reshape(-1, width) if width else dense[present]
    created = pc.fill_null(table["created_at"].cast(pa.int64()), int(UNKNOWN_TIME))
    out = pa.record_batch(
        {
            "item_id": table["item_id"].combine_chunks(),
            "category": pc.fill_null(table["category_id"], 0).combine_chunks(),
            "advertiser": pc.fill_null(table["advertiser_id"], 0).combine_chunks(),
            "created": created.combine_chunks(),
            # from_arrays refuses a width of 0: items without dense features.
            "dense": pa.FixedSizeListArray.from_buffers(
                pa.list_(pa.float32(), width), len(table), [None], children=[pa.array(dense.reshape(-1))]
            ),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, out.schema) as writer:
        writer.write_batch(out)
    partial.replace(path)


ITEM_SCHEMA = pa.schema(
    [
        ("item_id", pa.int64()),
        ("category_id", pa.int64()),
        ("advertiser_id", pa.int64()),
        ("created_at", pa.timestamp("us", tz="UTC")),
        ("features", pa.list_(pa.float32())),
    ]
)
