"""The same model on a GPU: for `bench/gpu_check.sh`, skipped where there is none."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from solaris_udf.codec import decode
from solaris_udf.foundation.check import check_model
from solaris_udf.foundation.export import export_split_model
from solaris_udf.foundation.inference import Limits, embed_batches
from solaris_udf.foundation.items import ITEM_SCHEMA, ItemTable, write_item_file
from solaris_udf.foundation.model import load_model
from solaris_udf.foundation.process import train_files
from solaris_udf.foundation.projection import ProjectedHead, Projection
from solaris_udf.foundation.reference import INPUTS, SIZES, ReferenceModel
from tests.udf.test_foundation_inference import batch, user

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
USERS, ITEMS_EACH = 300, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    torch.manual_seed(0)
    model = ReferenceModel(SIZES["demo"], 2, 0)
    export_split_model(
        model.encoder,
        ProjectedHead(model.head, Projection(model.head.width, 2, 32)),
        folder / "model",
        name="gpu",
        inputs=[name for name in INPUTS if name != "item_dense"],
        heads=["click", "conversion"],
        lengths={"clicked": 24, "shown": 16},
    )
    write_item_file(
        [
            pa.RecordBatch.from_pylist(
                [{**dict.fromkeys(ITEM_SCHEMA.names), "item_id": n, "category_id": n % 9} for n in range(500)],
                schema=ITEM_SCHEMA,
            )
        ],
        folder / "items.arrow",
    )
    return folder


def vectors(folder, model, limits=None):
    """Embeddings of all pairs, [P, 32], in the order of the pairs."""
    rows = batch(
        *[
            user(u, [(u * 7 + n) % 500 for n in range(ITEMS_EACH)], [((u + n) % 500, n + 1) for n in range(u % 25)])
            for u in range(USERS)
        ]
    )
    items = ItemTable.open(folder / "items.arrow")
    table = pa.Table.from_batches(list(embed_batches([rows], model, items, limits=limits)))
    table = table.sort_by([("user_id", "ascending"), ("item_id", "ascending")])
    assert len(table) == USERS * ITEMS_EACH and not any(table["reason"].to_pylist())
    return decode(table["embedding"])


@pytest.mark.parametrize(
    ("half", "compiled", "tolerance"), [(False, False, 2e-3), (True, False, 3e-2), (True, True, 3e-2)]
)
def test_a_gpu_gives_the_vectors_of_the_cpu(folder, half, compiled, tolerance):
    gpu = load_model(folder / "model", device="cuda:0", half=half, compiled=compiled)
    np.testing.assert_allclose(vectors(folder, gpu), vectors(folder, load_model(folder / "model")), atol=tolerance)


def test_a_full_gpu_halves_its_batches_and_loses_nothing(folder):
    whole = vectors(folder, load_model(folder / "model", device="cuda:0"))
    tight = load_model(folder / "model", device="cuda:0")
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + (24 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = vectors(folder, tight, Limits(tokens=1_000_000, pairs=1_000_000, bytes=0))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_allclose(found, whole, atol=2e-3)


def test_the_reference_model_trains_on_a_gpu(folder, tmp_path):
    hour = 3_600_000_000
    rows = [
        {
            "user_id": u,
            "events": [
                {"time": n * hour, "item_id": (u + n) % 50, "clicked": (u + n) % 3 == 0, "converted": False}
                for n in range(20)
            ],
            "requests": [{"time": n * hour, "scored": 5} for n in range(20)],
        }
        for u in range(100)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "users.parquet")
    trained = train_files(
        users=str(tmp_path / "users.parquet"),
        items=str(folder / "items.arrow"),
        folder=str(tmp_path / "trained"),
        plan={"size": "tiny", "epochs": 2, "embedding_dim": 8},
        conversions=False,
        mature_before=0,
    )
    assert trained is not None and np.isfinite(trained.log_loss)
    assert check_model(tmp_path / "trained") == []
