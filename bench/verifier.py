"""What a budget buys: the verifier beside baselines and oracles, its calibration, speed and scaling.

The logs are the demo's simulated platform and MovieLens 100K. The verifier is trained by train_verifier at the start
of each of two test days, on what was known then; the test is the eight windows of those days. Each window's candidates
are what predict_pairs has, with nothing embedded before (so nothing is reused). A method gives each of its pairs a
value, and the same selection (solaris_udf/selection.py) spends the same budget on each: a share of what all candidates
would cost, a user's first pair paying for the user too.

What counts is the window's scored rows whose pair was chosen, as a share of all its scored rows, those of pairs that no
source named included. Rows count when they happened, also if they arrived later. Baselines rank the candidates; the
two oracles may choose any pair. The hindsight oracle knows the window's rows. The replay oracle knows the state of the
world at the window's start: its values are the mean rows over re-simulations of that window with other seeds. That
state is more than any log tells; the observer (verifier_observer.py) ranks the candidates by what the log can tell.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from measure import Figure, arguments, at_least, at_most, report
from rich.table import Table
from verifier_data import LOGS, PAIR, TestWindow, config_of, prepare, rows_before, test_starts, test_windows, train
from verifier_observer import Observer
from verifier_speed import scaling, scoring_rate

from jobs.common.clock import micros
from jobs.common.session import build_session
from jobs.common.terminal import console
from jobs.common.world_files import world_parameters
from solaris_udf.selection import Costs, select_pairs
from solaris_udf.world.parameters import HOUR, WorldParameters
from solaris_udf.world.replay import replay
from solaris_udf.world.simulate import World, simulate, state_at

BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
COSTS = Costs(1_282_304.0, 119_536.0)  # FLOP: what model.json of the reference model of size "demo" says
REPLAYS = 20
BASELINES = ("recency", "frequency", "popularity", "random")
Coverage = dict[str, list[float]]  # covered rows by method, one a budget


def values_of(candidates: pd.DataFrame) -> dict[str, npt.NDArray[np.float64]]:
    """What each method that ranks the candidates says of them; all positive, more is better."""
    return {
        "ours": candidates["expected_rows"].to_numpy(),
        "recency": 1.0 / (1.0 + candidates["hours_since_last"].to_numpy()),
        "frequency": candidates["decayed"].to_numpy() + 1e-9,
        "popularity": candidates["item_rows_24h"].to_numpy() + 1e-9,
        "random": np.random.default_rng(1).uniform(size=len(candidates)),
    }


def replayed(parameters: WorldParameters, starts: Sequence[int], hours: float) -> list[pd.DataFrame]:
    """Mean scored rows of each pair (user_id, item_id, rows) in each window, over re-simulations from its start."""
    world, found = World(parameters), []
    state = state_at(world, np.arange(parameters.users), starts[0])
    for start in starts:
        _, state = simulate(world, state, state.time, start, parameters.seed)
        window = (start, start + round(hours * HOUR))
        futures = [
            pd.DataFrame(
                dict(zip((*PAIR, "rows"), replay(parameters, state, window, 1000 + seed, world=world), strict=True))
            )
            for seed in range(REPLAYS)
        ]
        found.append(
            pd.concat(futures).groupby(PAIR, as_index=False)["rows"].sum().assign(rows=lambda f: f.rows / REPLAYS)
        )
    return found


def contest(
    windows: Sequence[TestWindow],
    oracle: Sequence[pd.DataFrame] | None,
    observer: Sequence[npt.NDArray[np.float64]] | None,
    costs: Costs,
) -> Coverage:
    """Covered rows over all windows, by method and budget. oracle: its pairs, valued; observer: candidates' values."""
    covered: dict[str, npt.NDArray[np.float64]] = {}

    def add(name: str, pairs: pd.DataFrame, values: npt.NDArray[np.float64], window: TestWindow, full: float) -> None:
        users, items, rows = pairs["user_id"].to_numpy(), pairs["item_id"].to_numpy(), window.rows_of(pairs)
        bought = [rows[select_pairs(users, items, values, costs, share * full)].sum() for share in BUDGETS]
        covered[name] = covered.get(name, np.zeros(len(BUDGETS))) + np.array(bought)

    for place, window in enumerate(windows):
        pairs = window.candidates
        full = costs.total(pairs["user_id"].nunique(), len(pairs))
        for name, values in values_of(pairs).items():
            add(name, pairs, values, window, full)
        add("hindsight", window.happened, window.happened["rows"].to_numpy(dtype=np.float64), window, full)
        if observer is not None:
            add("observer", pairs, observer[place], window, full)
        if oracle is not None:
            add("replay", oracle[place], oracle[place]["rows"].to_numpy(), window, full)
    return {name: values.tolist() for name, values in covered.items()}


def show(title: str, covered: Coverage, total: float) -> None:
    """Prints the shares of all scored rows, and ours as a share of the replay oracle's."""
    table = Table("budget", *covered, title=title, title_justify="left")
    if "replay" in covered:
        table.add_column("ours / replay", justify="right")
    for place, budget in enumerate(BUDGETS):
        shares = [f"{values[place] / total:.1%}" for values in covered.values()]
        ratio = [f"{covered['ours'][place] / covered['replay'][place]:.3f}"] if "replay" in covered else []
        table.add_row(f"{budget:.0%}", *shares, *ratio)
    console.print(table)


def contest_figures(name: str, covered: Coverage) -> list[Figure]:
    """Ours against the replay oracle and against the best baseline."""
    figures = []
    for place, budget in enumerate(BUDGETS):
        ours, best = covered["ours"][place], max(covered[each][place] for each in BASELINES)
        if "replay" in covered:
            share = ours / covered["replay"][place]
            label = f"{name}: covered rows at {budget:.0%}, share of the replay oracle's"
            figures.append(at_least(label, share, "", 0.9) if budget >= 0.05 else Figure(label, share, ""))
            share = ours / covered["observer"][place]
            figures.append(Figure(f"{name}: covered rows at {budget:.0%}, share of the observer's", share, ""))
        if best or ours:
            label = f"{name}: covered rows at {budget:.0%}, times the best baseline's"
            figures.append(at_least(label, ours / best if best else float("inf"), "x", 1.0))
    return figures


def calibration(name: str, windows: Sequence[TestWindow]) -> list[Figure]:
    """Expected against realised hits (pairs scored at least once) and rows, over all candidates of the test windows."""
    probability = np.concatenate([window.candidates["probability"] for window in windows])
    expected = np.concatenate([window.candidates["expected_rows"] for window in windows])
    rows = np.concatenate([window.rows_of(window.candidates) for window in windows])
    if not rows.sum():
        return []
    table = Table("decile", "pairs", "expected hits", "hits", "expected / hits", title=f"{name}: calibration")
    worst = 0.0
    for place, part in enumerate(np.array_split(np.argsort(probability, kind="stable"), 10)):
        said, was = probability[part].sum(), float((rows[part] > 0).sum())
        worst = max(worst, abs(said / was - 1) if was else float("inf"))
        ratio = f"{said / was:.3f}" if was else "-"
        table.add_row(str(place + 1), f"{len(part):,}", f"{said:,.0f}", f"{was:,.0f}", ratio)
    console.print(table)
    hits = probability.sum() / (rows > 0).sum() - 1
    return [
        at_most(f"{name}: expected against realised hits", abs(hits), "off", 0.05),
        at_most(f"{name}: the same, worst decile of probability", worst, "off", 0.15),
        at_most(f"{name}: expected against realised rows", abs(expected.sum() / rows.sum() - 1), "off", 0.05),
    ]


def main() -> None:
    options = arguments(
        __doc__,
        data={"choices": [*LOGS, "both"], "default": "both", "help": "--quick: the world only"},
        cache={
            "type": Path,
            "default": Path(tempfile.gettempdir()) / "solaris-bench-verifier",
            "help": "folder for the logs, made once",
        },
        pairs_only={"action": "store_true", "help": "users cost nothing, as under budget_unit = pairs"},
    )
    costs = replace(COSTS, per_user=0.0) if options.pairs_only else COSTS
    names = ["world"] if options.quick else list(LOGS) if options.data == "both" else [options.data]
    figures: list[Figure] = []
    spark = build_session(config_of(names[0], options.cache), "bench verifier")
    try:
        for name in names:
            config = config_of(name, options.cache)
            hours, starts = config.window.hours, test_starts(name, config.window.hours)
            prepare(spark, config, name)
            train(spark, config, name)
            end = LOGS[name].first + timedelta(days=LOGS[name].days)
            windows = test_windows(spark, config, starts, end)
            oracle, observer = None, None
            if name == "world":
                parameters, times = world_parameters(spark, config), [micros(start) for start in starts]
                assert parameters is not None, "prepare makes the world"
                oracle = replayed(parameters, times, hours)
                filtered = Observer(World(parameters), rows_before(spark, config, end), micros(end))
                observer = [
                    filtered.values(window.candidates, time, hours) for window, time in zip(windows, times, strict=True)
                ]
            covered = contest(windows, oracle, observer, costs)
            total = float(sum(window.happened["rows"].sum() for window in windows))
            pairs = sum(len(window.candidates) for window in windows)
            show(f"{name}: covered share of {total:,.0f} scored rows; {pairs:,} candidates", covered, total)
            figures += contest_figures(name, covered) + calibration(name, windows)
        figures += scoring_rate(spark)
    finally:
        spark.stop()
    if not options.quick:
        figures += scaling(options.cache)
    report("verifier", figures, options.json)


if __name__ == "__main__":
    main()
