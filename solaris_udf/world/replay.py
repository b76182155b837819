"""Another future of the same past: what the replay oracle averages."""

import numpy as np

from solaris_udf.world.draws import Int64
from solaris_udf.world.ids import to_ids
from solaris_udf.world.parameters import WorldParameters
from solaris_udf.world.ranking import Ranker, noisy_ranker
from solaris_udf.world.simulate import World, simulate
from solaris_udf.world.state import State


def replay(
    parameters: WorldParameters,
    state_at: State,
    window: tuple[int, int],
    seed: int,
    ranker: Ranker = noisy_ranker,
    world: World | None = None,
) -> tuple[Int64, Int64, Int64]:
    """Simulates a window (start, end; microseconds UTC) from the state at its start, with a seed of its own.

    Returns (user_id, item_id, scored_rows), each int64 [n]: every pair that was scored, once, and how many rows it had;
    ordered by user and item number. The mean over many seeds is the best forecast of scored rows that there is.
    `world` saves making the items again. Raises ValueError as simulate does.
    """
    world = world if world is not None else World(parameters)
    rows, _ = simulate(world, state_at, window[0], window[1], seed, ranker)
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((rows.item, rows.user))
    user, item = rows.user[order], rows.item[order]
    first = np.flatnonzero(np.r_[True, (np.diff(user) != 0) | (np.diff(item) != 0)])
    counts = np.diff(first, append=len(user))
    return to_ids("user", user[first]), to_ids("item", item[first]), counts
