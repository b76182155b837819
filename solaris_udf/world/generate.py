"""What a Spark task runs: chunks of users through all of a world's time, as Arrow batches."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from solaris_udf.world.log_rows import item_batches, log_batch
from solaris_udf.world.parameters import HOUR, WorldParameters
from solaris_udf.world.simulate import World, initial_state, simulate

CHUNK = 1_000  # users at once: enough to vectorize over, and a day of theirs is some 100,000 rows (15 MB)
Batches = Iterator[pa.RecordBatch]


def log_generator(parameters: WorldParameters, end: int) -> Callable[[Batches], Batches]:
    """For mapInArrow: user numbers (first column, int64) in, their rows until `end` in LOG_SCHEMA out.

    end: microseconds UTC.
    """

    def generate(batches: Batches) -> Batches:
        world = World(parameters)
        world.items(end)
        for batch in batches:
            numbers = batch.column(0).to_numpy()
            for first in range(0, len(numbers), CHUNK):
                state = initial_state(world, numbers[first : first + CHUNK])
                while state.time < end:
                    until = min(state.time + 24 * HOUR, end)
                    rows, state = simulate(world, state, state.time, until, parameters.seed)
                    if len(rows):
                        yield log_batch(rows, parameters.rules, parameters.seed)

    return generate


def item_generator(parameters: WorldParameters, end: int) -> Callable[[Batches], Batches]:
    """For mapInArrow over one row: every campaign that starts before `end`, in ITEM_SCHEMA."""

    def generate(batches: Batches) -> Batches:
        for batch in batches:
            for _ in np.arange(batch.num_rows):
                yield from item_batches(World(parameters).items(end), end)

    return generate
