"""The function for DataFrame.mapInArrow that embeds pairs, and the model cache of a worker process."""

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from solaris_udf.foundation.alignment import rotated
from solaris_udf.foundation.contract import load_description
from solaris_udf.foundation.inference import OUTPUT_DDL, Limits, embed_batches
from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.model import Loader, Model, load_model
from solaris_udf.foundation.users import Array

__all__ = ["OUTPUT_DDL", "assigned_device", "embed_udf", "embed_udf_of", "model_of"]

EmbedFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

# One model a worker process: Spark reuses Python workers for later tasks, and reloading for each would cost more than
# a task's inference. A worker that serves several models in turn (a rollout) keeps the latest only.
_models: dict[str, Model] = {}


def model_of(key: str, load: Loader) -> Model:
    """The process's model of that key, loaded on first use. The key changes with anything that changes the model."""
    if key not in _models:
        _models.clear()
        _models[key] = load()
    return _models[key]


def assigned_device() -> str:
    """The GPU that Spark gave this task (`cuda:N`); cpu where it gave none."""
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context else None
    return f"cuda:{gpu.addresses[0]}" if gpu and gpu.addresses else "cpu"


def embed_udf(
    model_folder: str | Path,
    items_path: str | Path,
    *,
    codec: str = "float16",
    threads: int = 1,
    logits: bool = False,
    limits: Limits | None = None,
    half: bool = True,
    compiled: bool = False,
    roots: Sequence[str | Path] | None = None,
    rotation: Array | None = None,
) -> EmbedFunction:
    """The function that embeds pairs with the model in a folder; see embed_batches for what it does.

    Input rows: user_id BIGINT, at TIMESTAMP, shown and clicked as in user_histories, requests, scored_rows, shown_rows,
    clicked_rows BIGINT, item_ids ARRAY<BIGINT>, and, if wanted, probabilities ARRAY<DOUBLE>, one an item id. Output:
    OUTPUT_DDL. items_path is a file of write_item_file, on every
    worker's disk. threads is Spark's task cpus. half applies on a GPU only. rotation [d, d] turns the embeddings (see
    alignment.py). Hashes are verified here and again by each worker before it loads.
    """
    folder, allowed = str(model_folder), None if roots is None else [str(root) for root in roots]
    version = load_description(folder, allowed).version

    turned = "" if rotation is None else sha256(rotation.tobytes()).hexdigest()

    def key() -> str:
        return f"{version} {folder} {assigned_device()} {half} {compiled} {turned}"

    def load() -> Model:
        model = load_model(
            folder, device=assigned_device(), threads=threads, half=half, compiled=compiled, roots=allowed
        )
        return model if rotation is None else rotated(model, rotation)

    return _embed_function(load, key, str(items_path), codec, threads, logits, limits)


def embed_udf_of(
    loader: Loader,
    items_path: str | Path,
    *,
    codec: str = "float16",
    threads: int = 1,
    logits: bool = False,
    limits: Limits | None = None,
    key: str | None = None,
) -> EmbedFunction:
    """embed_udf for a model that a zero-argument loader makes on the worker. The key names it in the worker's cache."""
    name = key or uuid.uuid4().hex
    return _embed_function(loader, lambda: name, str(items_path), codec, threads, logits, limits)


def _embed_function(
    load: Loader, key: Callable[[], str], items_path: str, codec: str, threads: int, logits: bool, limits: Limits | None
) -> EmbedFunction:
    def embed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # torch reads this once, when it is first imported; more threads than the task's CPUs slow everybody down.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        first = next(batches, None)
        if first is None:
            return

        def all_batches() -> Iterator[pa.RecordBatch]:
            yield first
            yield from batches

        model, items = model_of(key(), load), ItemTable.open(items_path)
        yield from embed_batches(all_batches(), model, items, codec=codec, logits=logits, limits=limits)

    return embed
