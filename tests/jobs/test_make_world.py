import json
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import functions as F

import jobs.make_world as make_world
from jobs.common.clock import micros
from jobs.common.errors import UserError
from jobs.make_world import Settings, run
from solaris_udf.world.log_rows import ORIGINAL, item_batches, log_batch
from solaris_udf.world.parameters import HOUR, WorldParameters
from solaris_udf.world.simulate import World, initial_state, simulate
from tests.conftest import AS_OF

OUTPUTS = {
    "log": "request_id string, event_time timestamp, arrived_at timestamp, user_id bigint, item_id bigint, "
    "surface string, position int, shown boolean, clicked boolean",
    "items": "item_id bigint, category_id bigint, advertiser_id bigint, created_at timestamp, bid double, "
    "objective string, features array<float>",
    "label_events": "request_id string, item_id bigint, label string, occurred_at timestamp, arrived_at timestamp, "
    "value double",
    "truth": "request_id string, item_id bigint, click_probability double, conversion_probability double",
}


def test_a_preset_gives_what_is_not_set():
    tiny = Settings(size="tiny", users=7, days=2)
    parameters = tiny.parameters(5)
    assert (parameters.users, parameters.items, tiny.days_or_preset(), parameters.start) == (7, 60, 2, 5)
    demo = Settings()
    assert (demo.parameters(0).users, demo.parameters(0).items, demo.days_or_preset()) == (600, 300, 6)


@pytest.mark.parametrize(
    "setting", ["users=0", "users=-3", "items=0", "days=0", "days=1.5", "world=easy", "size=huge", "seed=-1"]
)
def test_what_can_not_be_is_a_config_error_that_names_the_key(make_config, setting):
    with pytest.raises(UserError, match=f"make_world.{setting.split('=')[0]}"):
        make_config(f"make_world.{setting}")


def read(spark, root, name):
    frame = spark.read.parquet(f"{root}/raw/world/{name}")
    assert ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema) == OUTPUTS[name]
    return frame


def rows_of(frame):
    times = [field.name for field in frame.schema if field.dataType.typeName() == "timestamp"]
    frame = frame.withColumns({name: F.unix_micros(name) for name in times})
    return sorted(tuple(row) for row in frame.collect())


def test_a_world_is_written_whole_and_a_retry_replaces_it(spark, root, make_run, monkeypatch):
    overrides = ["make_world.size=tiny", "make_world.users=25", "make_world.days=2", "make_world.seed=3"]
    report = run(*make_run("make_world", AS_OF, *overrides))
    found = {name: rows_of(read(spark, root, name)) for name in OUTPUTS}

    # The same as one chunk in this process, without Spark: so it does not matter how the users are cut.
    start, end = micros(AS_OF) - 48 * HOUR, micros(AS_OF)
    world = World(WorldParameters("standard", 3, 25, 60, start))
    rows, _ = simulate(world, initial_state(world, np.arange(25)), start, end, 3)
    expected = log_batch(rows, world.parameters.rules, 3)
    columns = [expected.column(name) for name in ("event_time", "arrived_at")]
    plain = expected.to_pydict()
    plain["event_time"], plain["arrived_at"] = (column.cast("int64").to_pylist() for column in columns)
    wanted = [field.split()[0] for field in OUTPUTS["log"].split(", ")]
    assert found["log"] == sorted(zip(*(plain[name] for name in wanted), strict=True))
    wanted = [field.split()[0] for field in OUTPUTS["truth"].split(", ")]
    originals = zip(*(plain[name] for name in ("kind", *wanted)), strict=True)
    assert found["truth"] == sorted(row[1:] for row in originals if row[0] == ORIGINAL)
    assert len(found["label_events"]) == int(rows.converted.sum()) > 0
    assert [row[0] for row in found["items"]] == sorted(
        item for batch in item_batches(world.items(end), end) for item in batch.column("item_id").to_pylist()
    )
    assert all(start <= row[1] for row in found["log"])
    assert sum(row[1] >= end or row[1] > row[2] for row in found["log"]) == report.metrics["future"]

    assert report.rows_out == len(found["log"]) == report.metrics["rows"]
    assert report.metrics["late"] == sum(plain["late"])
    assert report.metrics["duplicates"] == sum(kind == 1 for kind in plain["kind"])
    assert report.metrics["ctr"] == pytest.approx(rows.clicked.sum() / rows.shown.sum())
    assert report.metrics["conversions"] == len(found["label_events"]) and 0.3 < report.metrics["truth_ne"] < 1.2
    folder = Path(root) / "raw" / "world"
    assert WorldParameters.from_json((folder / "world.json").read_text()) == world.parameters
    assert json.loads((folder / "world.json").read_text())["rules"]["taste_weight"] == 0.9

    with monkeypatch.context() as patch:
        patch.setattr(make_world, "label_events", lambda rows: 1 / 0)  # the log is written by then
        with pytest.raises(ZeroDivisionError):
            run(*make_run("make_world", AS_OF, *overrides[:-1], "make_world.seed=4"))
    assert rows_of(read(spark, root, "log")) == found["log"]
    run(*make_run("make_world", AS_OF, *overrides))
    assert {name: rows_of(read(spark, root, name)) for name in OUTPUTS} == found
    assert [path.name for path in (Path(root) / "raw").iterdir()] == ["world"]
