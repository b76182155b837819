"""The Ray Data row of bench/fm_inference.py, which starts this in the interpreter that --ray names.

    PYTHON bench/fm_ray.py ROWS MODEL ITEMS TOKENS PAIRS BYTES

The job's own function in two actors, on the parquet file of grouped rows that Spark reads too; the last three are its
Limits. For each line on standard input: one pass, answered with the seconds from the first batch's start to the last
one's end. The actors' start and the loading of the model are left out.
"""

import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from solaris_udf.foundation.inference import Limits, embed_batches
from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.model import load_model


class Embed:
    """An actor: the model and the items, loaded once. Says of each batch how many pairs it had and when."""

    def __init__(self, model_folder: str, items: str, limits: Limits) -> None:
        self.model, self.items, self.limits = load_model(model_folder, threads=1), ItemTable.open(items), limits

    def __call__(self, batch: pa.Table) -> pa.Table:
        start = time.monotonic()  # one clock for all processes of a machine
        given = batch.combine_chunks().to_batches()
        found = pa.Table.from_batches(list(embed_batches(given, self.model, self.items, limits=self.limits)))
        times = {"start": start, "end": time.monotonic()}
        for name, at in times.items():
            found = found.append_column(name, pa.array(np.full(len(found), at)))
        return found


def seconds(rows: str, *arguments: object) -> float:
    """One pass over all rows."""
    data = ray.data.read_parquet(rows).repartition(8)  # or one file is one block, which one actor gets
    pool = ray.data.ActorPoolStrategy(size=2)
    found = data.map_batches(
        Embed, fn_constructor_args=arguments, compute=pool, num_cpus=1, batch_format="pyarrow", batch_size=1000
    )
    start, end = float("inf"), 0.0
    for table in found.iter_batches(batch_size=None, batch_format="pyarrow"):
        start = min(start, pc.min(table["start"]).as_py())
        end = max(end, pc.max(table["end"]).as_py())
    return end - start


def main() -> None:
    rows, model_folder, items, *limits = sys.argv[1:]
    # By name three CPUs: with two, the actors would leave none to read with.
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=1 << 30, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().enable_progress_bars = False
    print("fm_ray: ready", flush=True)
    for _ in sys.stdin:
        print("fm_ray:", seconds(rows, model_folder, items, Limits(*map(int, limits))), flush=True)


if __name__ == "__main__":
    main()
