"""The simulated ad platform: a world whose rules, states and true probabilities are known.

`parameters` (WorldParameters, Rules, SIZES), `simulate` (World, initial_state, simulate, state_at), `ranking`
(Candidates, Ranker, noisy_ranker), `replay` (replay), `log_rows` (Arrow rows as a raw log has them). docs/world.md has
the rules. Everything is numpy, except log_rows and generate (pyarrow). This package itself imports nothing.

    parameters = WorldParameters(world="standard", seed=1, users=2000, items=800, start=start_micros)
    world = World(parameters)
    state = state_at(world, users=np.arange(2000), time=window_start)
    rows, state = simulate(world, state, window_start, window_end, seed=parameters.seed, ranker=noisy_ranker)
"""
