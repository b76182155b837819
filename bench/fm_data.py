"""What bench/fm_inference.py runs on: reference models with weights of no meaning, items, users and their pairs."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from solaris_udf.foundation.contract import Description
from solaris_udf.foundation.export import export_split_model
from solaris_udf.foundation.features import COUNTS
from solaris_udf.foundation.items import ITEM_SCHEMA, write_item_file
from solaris_udf.foundation.projection import ProjectedHead, Projection
from solaris_udf.foundation.reference import INPUTS, SIZES, ReferenceModel, Size

AT = 1_767_571_200_000_000  # 2026-01-05, microseconds UTC
TIME = pa.timestamp("us", tz="UTC")
ITEMS, DENSE, DIM, PAIRS_PER_USER = 20_000, 4, 32, 50


@dataclass(frozen=True)
class Subject:
    """A model as modules and as the folder exported from them."""

    encoder: torch.nn.Module
    head: torch.nn.Module
    folder: Path
    description: Description


def modules_of(size: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Encoder and head of the reference model of a size, the same at each call."""
    torch.manual_seed(0)
    model = ReferenceModel(dimensions_of(size), 2, DENSE).eval()
    return model.encoder, ProjectedHead(model.head, Projection(model.head.width, 2, DIM)).eval()


def dimensions_of(size: str) -> Size:
    """The large one's id tables are cut: they cost memory, not time."""
    return replace(SIZES[size], buckets=min(SIZES[size].buckets, 1 << 14))


def make_model(size: str, folder: Path) -> Subject:
    """The reference model of a size, exported to the folder."""
    (encoder, head), dimensions = modules_of(size), dimensions_of(size)
    lengths = {"clicked": dimensions.clicked_length, "shown": dimensions.shown_length}
    description = export_split_model(
        encoder,
        head,
        folder,
        name=size,
        inputs=INPUTS,
        heads=["click", "conversion"],
        dense=DENSE,
        lengths=lengths,
    )
    return Subject(encoder, head, folder, description)


def make_items(path: Path) -> np.ndarray:
    """Writes the item file, and the same rows as path.parquet; returns the ids, sorted."""
    draw = np.random.default_rng(1)
    ids = np.unique(draw.integers(-(2**62), 2**62, ITEMS))
    values = pa.array(draw.standard_normal((len(ids), DENSE)).astype(np.float32).ravel())
    features = pa.ListArray.from_arrays(pa.array(np.arange(len(ids) + 1, dtype=np.int32) * DENSE), values)
    created = pa.array(AT - draw.integers(0, 30 * 24 * 3_600_000_000, len(ids))).cast(TIME)
    columns = [pa.array(ids), pa.array(draw.integers(1, 25, len(ids))), pa.array(draw.integers(1, 500, len(ids)))]
    rows = pa.record_batch([*columns, created, features], schema=ITEM_SCHEMA)
    write_item_file([rows], path)
    pq.write_table(pa.Table.from_batches([rows]), path.with_suffix(".parquet"))
    return ids


def make_users(ids: np.ndarray, users: int, subject: Subject) -> pa.Table:
    """Rows as embed_pairs gives to the model's function: histories of 0 to full length, each with so many pairs."""
    draw = np.random.default_rng(2)

    def events(longest: int, shown: bool) -> pa.Array:
        sizes = draw.integers(0, longest + 1, users)
        ends = np.cumsum(sizes)
        owner = np.repeat(np.arange(users), sizes)
        age = draw.integers(1, 72 * 3_600_000_000, ends[-1])
        age = age[np.lexsort((-age, owner))]  # oldest first
        fields = {"item_id": pa.array(draw.choice(ids, ends[-1])), "event_time": pa.array(AT - age).cast(TIME)}
        if shown:
            fields["clicked"] = pa.array(draw.random(ends[-1]) < 0.1)
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(list(fields.values()), list(fields)))

    lengths = subject.description.lengths
    # Distinct items of a user: steps of less than a 50th of the table from a place of their own.
    first, step = draw.integers(0, len(ids), (users, 1)), draw.integers(1, len(ids) // PAIRS_PER_USER, (users, 1))
    pairs = pa.array(ids[(first + step * np.arange(PAIRS_PER_USER)) % len(ids)].ravel())
    counts = -np.sort(-draw.integers(0, 200, (users, len(COUNTS))), axis=1)  # no more clicks than rows
    return pa.table(
        {
            "user_id": pa.array(draw.permutation(users) * 7919 - 2**40),
            "at": pa.array(np.full(users, AT)).cast(TIME),
            "shown": events(lengths["shown"], True),
            "clicked": events(lengths["clicked"], False),
            **{name: pa.array(counts[:, place]) for place, name in enumerate(COUNTS)},
            "item_ids": pa.ListArray.from_arrays(
                pa.array(np.arange(users + 1, dtype=np.int32) * PAIRS_PER_USER), pairs
            ),
        }
    )
