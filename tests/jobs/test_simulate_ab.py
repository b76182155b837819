import numpy as np
import pytest

from jobs import simulate_ab
from jobs.common.clock import from_micros, micros
from jobs.common.errors import UserError
from solaris_udf.world.ids import to_ids
from solaris_udf.world.parameters import SURFACES, WorldParameters
from solaris_udf.world.simulate import World, simulate, state_at
from solaris_udf.world.state import open_market
from tests.conftest import AS_OF, hours
from tests.jobs.snapshots import Pair, snapshot_row, vector, write_snapshot
from tests.jobs.test_evaluate_uplift import training_row

PARAMETERS = WorldParameters(world="standard", seed=1, users=150, items=40, start=micros(AS_OF - hours(48)))


def logits(chances):
    return np.log(chances / (1 - chances))


@pytest.fixture
def world(root, fill):
    """A small world whose vectors tell the truth: the logit of a click."""
    world = World(PARAMETERS)
    users = np.arange(PARAMETERS.users)
    start = micros(AS_OF - hours(36))
    rows, state = simulate(world, state_at(world, users, start), start, micros(AS_OF), PARAMETERS.seed)
    items = world.items(micros(AS_OF + hours(6)))
    fill(
        "items",
        [
            {"item_id": int(item), "category_id": int(category)}
            for item, category in zip(to_ids("item", np.arange(len(items.category))), items.category, strict=True)
        ],
        AS_OF - hours(36),
    )
    for back in range(6):
        as_of = AS_OF - hours(6 * back)
        window = (rows.event_time >= micros(as_of - hours(6))) & (rows.event_time < micros(as_of))
        within = np.flatnonzero(rows.shown & window)
        made = []
        for row in within:
            truth = np.array(vector(float(logits(rows.click_probability[row]))), np.float32)
            one = training_row(
                f"{as_of}-{row}",
                as_of,
                int(to_ids("user", rows.user[row])[0]),
                int(to_ids("item", rows.item[row])[0]),
                truth if row % 4 else None,  # as in the window, where the snapshot is late and campaigns begin
                bool(rows.clicked[row]),
            )
            made.append(
                {**one, "event_time": from_micros(int(rows.event_time[row])), "surface": SURFACES[rows.surface[row]]}
            )
        fill("training_rows", made, as_of)
    running = open_market(items, PARAMETERS.rules, micros(AS_OF), None).running
    item = np.broadcast_to(running, (len(users), len(running)))
    _, match, _ = world.truth.match(state.taste[:, users], items.vector[:, item])
    chance = world.truth.click(
        state.users,
        users,
        items,
        item,
        match,
        state.last_categories,
        np.zeros(item.shape),
        np.zeros(len(users), np.int64),
    )
    pairs = [
        Pair(int(user), int(to_ids("item", number)[0]), AS_OF, vector(float(value)))
        for user, numbers, values in zip(to_ids("user", users), item, logits(chance), strict=True)
        for number, value in zip(numbers, values, strict=True)
    ]
    fill("snapshots", [snapshot_row(write_snapshot(root, AS_OF, pairs, []), AS_OF + hours(1))], AS_OF)
    folder = root / "raw" / "world"
    folder.mkdir(parents=True)
    (folder / "world.json").write_text(PARAMETERS.to_json())


@pytest.mark.slow
def test_a_ranker_that_reads_the_truth_earns_more_than_one_that_does_not(make_run, tables, world):
    settings = ["simulate_ab.users=120", "simulate_ab.epochs=10", "simulate_ab.batch=64", "simulate_ab.replicates=300"]
    report = simulate_ab.run(*make_run("simulate_ab", AS_OF, *settings))
    rows = tables.read("vm_evaluations").collect()
    found = {(row.model, row.metric): row for row in rows}
    assert len(found) == len(rows) == report.rows_out
    assert {row.sweep for row in rows} == {"ab"} and {row.seed for row in rows} == {-1}
    lift = found["vm_with_snapshot", "revenue_lift"]
    assert lift.value > 5 and lift.ci_low > 0
    # Each arm is judged on what it chose to show, its most hopeful predictions: no sign is certain with few rows.
    rll = found["vm_with_snapshot", "rll"]
    assert rll.ci_low < rll.value < rll.ci_high and rll.value != 0
    # The snapshot goes live an hour into the window of six; every pair of its time is in it, later campaigns are not.
    assert 0.6 < found["vm_with_snapshot", "coverage"].value < 0.95
    assert found["vm_without_snapshot", "coverage"].value == 0
    assert found["vm_without_snapshot", "rll"].value == 0
    chance = found["vm_without_snapshot_again", "revenue_lift"]
    assert chance.ci_low < 0 < chance.ci_high and "A/A" in chance.note
    revenue = {model: found[model, "revenue"].value for model in ("vm_with_snapshot", "vm_without_snapshot")}
    assert lift.value == pytest.approx(100 * (revenue["vm_with_snapshot"] / revenue["vm_without_snapshot"] - 1))

    simulate_ab.run(*make_run("simulate_ab", AS_OF, *settings))
    again = {(row.model, row.metric): row.value for row in tables.read("vm_evaluations").collect()}
    assert again == {key: row.value for key, row in found.items()}


def test_the_world_may_be_at_a_uri(make_run, root):
    folder = root / "raw" / "world"
    folder.mkdir(parents=True)
    (folder / "world.json").write_text(PARAMETERS.to_json())
    run, _ = make_run("simulate_ab", AS_OF, f"storage.root=file://{root}", f"storage.files={root}")
    assert simulate_ab.simulated_world(run) == PARAMETERS


def test_without_a_simulated_world_there_is_no_closed_loop(make_run):
    with pytest.raises(UserError, match=r"needs the simulated world.*run make_world first"):
        simulate_ab.run(*make_run("simulate_ab", AS_OF))
    with pytest.raises(UserError, match="needs the simulated world"):
        simulate_ab.run(*make_run("simulate_ab", AS_OF, "log.dataset=movielens-100k"))
