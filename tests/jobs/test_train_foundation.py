"""train_foundation: no example sees its own time or later, the model learns, a killed training resumes."""

import logging
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs.train_foundation as job
from jobs.common.clock import micros
from jobs.common.errors import RunFailed
from jobs.common.log import log_before
from solaris_udf.foundation import training
from solaris_udf.foundation.check import check_model
from solaris_udf.foundation.items import ITEM_SCHEMA, ItemTable, write_item_file
from solaris_udf.foundation.losses import click_loss, split_by_time
from solaris_udf.foundation.programs import load_program
from solaris_udf.foundation.samples import batches_of, read_samples
from solaris_udf.foundation.training import Plan, train
from tests.conftest import AS_OF, hours, log_row

HOUR = 3_600_000_000
LENGTHS = {"clicked": 3, "shown": 4}


@pytest.fixture
def items(tmp_path):
    rows = [{**dict.fromkeys(ITEM_SCHEMA.names), "item_id": item, "category_id": 1 + item % 2} for item in range(10)]
    write_item_file([pa.RecordBatch.from_pylist(rows, schema=ITEM_SCHEMA)], tmp_path / "items.arrow")
    return ItemTable.open(tmp_path / "items.arrow")


def write_users(path, users):
    """users: {user_id: ([(hour, item, clicked, converted)], [(hour, scored)])}."""
    rows = [
        {
            "user_id": user,
            "events": [{"time": h * HOUR, "item_id": i, "clicked": c, "converted": v} for h, i, c, v in events],
            "requests": [{"time": h * HOUR, "scored": n} for h, n in requests],
        }
        for user, (events, requests) in users.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_each_example_has_the_history_strictly_before_its_time(items, tmp_path):
    path = write_users(
        tmp_path / "users.parquet",
        {
            7: (
                [
                    (1, 1, True, True),
                    (1, 2, False, False),
                    (2, 3, True, False),
                    (3, 4, True, True),
                    (4, 5, False, False),
                    (5, 6, True, False),
                ],
                [(1, 10), (2, 10), (2.5, 10), (3, 10), (4, 10), (5, 10)],
            ),
            3: ([(2, 8, False, False)], [(2, 5)]),
        },
    )
    samples = read_samples(path, items, LENGTHS, conversions=True, mature_before=4 * HOUR)
    # Entries: user 3 at 2 h; user 7 at 1, 2, 3, 4, 5 h.
    batch = samples.batch(
        np.arange(6),
        ("user_id", "user_counts", "clicked_item", "shown_item", "shown_clicked", "clicked_age_hours"),
        ("item_id", "item_category"),
    )
    assert batch.users["user_id"].tolist() == [3, 7, 7, 7, 7, 7]
    assert batch.users["clicked_item"][:, :4].tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 3, 0, 0],
        [1, 3, 4, 0],
        [1, 3, 4, 0],
    ]
    assert batch.users["shown_item"][:, :5].tolist() == [
        [0] * 5,
        [0] * 5,
        [1, 2, 0, 0, 0],
        [1, 2, 3, 0, 0],
        [1, 2, 3, 4, 0],
        [2, 3, 4, 5, 0],
    ]
    assert batch.users["shown_clicked"][5, :4].tolist() == [False, True, True, False]
    assert batch.users["clicked_age_hours"][3, :2].tolist() == [2, 1]
    assert np.expm1(batch.users["user_counts"]).round().tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 10, 2, 1],
        [3, 30, 3, 2],
        [4, 40, 4, 3],
        [5, 50, 5, 3],
    ]
    assert batch.items["item_id"].tolist() == [8, 1, 2, 3, 4, 5, 6] and batch.index.tolist() == [0, 1, 1, 2, 3, 4, 5]
    nan = np.nan  # not clicked, or too young for its conversion to be known
    np.testing.assert_array_equal(batch.labels, [[0, nan], [1, 1], [0, nan], [1, 0], [1, 1], [0, nan], [1, nan]])
    train_states, validation = split_by_time(samples, 0.3)
    assert samples.users.at[train_states].max() < samples.users.at[validation].min()


def test_batches_hold_every_entry_once_and_depend_on_the_seed_only():
    lengths = np.arange(100) % 13
    first = list(batches_of(lengths, np.arange(100), 8, 5))
    assert sorted(np.concatenate(first).tolist()) == list(range(100)) and max(map(len, first)) == 8
    assert all(np.array_equal(a, b) for a, b in zip(first, batches_of(lengths, np.arange(100), 8, 5), strict=True))


def test_ne_is_the_log_loss_over_the_entropy_of_the_rate():
    labels = np.array([[1], [0], [0], [0]], dtype=np.float32)
    base = np.full((4, 1), np.log(1 / 3), dtype=np.float32)
    assert click_loss(labels, base) == (pytest.approx(0.562335, abs=1e-5), pytest.approx(1.0, abs=1e-6))


@pytest.fixture
def learnable(items, tmp_path):
    """A user clicks an item exactly if its category is that of the last click: only the ordered history tells."""
    random, users = np.random.default_rng(0), {}
    for user in range(150):
        events, last = [], user % 2
        for step in range(24):
            item = int(random.integers(0, 10))
            flip = random.random() < 0.15
            clicked = item % 2 == last
            events.append((step, item, clicked, clicked and item == 2))
            last = 1 - last if clicked and flip else last
        users[user] = (events, [(step, 10) for step in range(24)])
    path = write_users(tmp_path / "users.parquet", users)
    return read_samples(path, items, {"clicked": 16, "shown": 16}, conversions=True, mature_before=1000 * HOUR)


PLAN = Plan(size="tiny", embedding_dim=8, epochs=4, batch=64, learning_rate=1e-2, patience=4, projection_epochs=20)


@pytest.mark.slow
def test_it_learns_what_only_the_history_tells_and_resumes_to_the_same_model(learnable, tmp_path, monkeypatch, caplog):
    whole = train(learnable, PLAN, tmp_path / "whole", name="tiny")
    assert whole.ne < 0.85 < whole.baseline_ne and whole.reconstruction < 0.5
    assert whole.description.heads == ("click", "conversion") and whole.description.embedding_dim == 8
    assert check_model(tmp_path / "whole") == []

    # Killed after the second epoch's checkpoint, then started again.
    real, saves = training._Trainer._save, []

    def save(self, *arguments):
        real(self, *arguments)
        saves.append(1)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training._Trainer, "_save", save)
    with pytest.raises(KeyboardInterrupt):
        train(learnable, PLAN, tmp_path / "killed", name="tiny")
    assert not (tmp_path / "killed" / "model.json").exists()
    caplog.set_level(logging.INFO, "solaris")
    resumed = train(learnable, PLAN, tmp_path / "killed", name="tiny")
    assert "resuming after epoch 2" in caplog.text
    assert resumed.description.version == whole.description.version
    assert sorted(file.name for file in (tmp_path / "killed").iterdir()) == [
        "model.json",
        "pair_head.pt2",
        "user_encoder.pt2",
    ]
    other = train(learnable, replace(PLAN, epochs=1, seed=1), tmp_path / "other", name="tiny")
    assert other.description.version != whole.description.version


def bits(module):
    return {name: value.numpy(force=True).tobytes() for name, value in module.state_dict().items()}


def test_training_the_projection_leaves_the_model_as_it_was_to_the_bit(learnable, tmp_path, monkeypatch):
    project, seen = training._Trainer.project, {}

    def watched(self, states):
        seen["before"] = bits(self.model)
        trained = project(self, states)
        seen["after"] = bits(self.model)
        seen["untrained"] = bits(project(replace(self, plan=replace(self.plan, projection_epochs=0)), states))
        seen["projection"] = bits(trained)
        return trained

    monkeypatch.setattr(training._Trainer, "project", watched)
    train(learnable, replace(PLAN, epochs=1, projection_epochs=3), tmp_path / "model", name="tiny")
    assert seen["after"] == seen["before"]
    # It was trained, all of it; what is standardized by is measured, not trained.
    learned = {name for name, value in seen["projection"].items() if value != seen["untrained"][name]}
    assert learned == {name for name in seen["projection"] if name.startswith(("encoder", "decoder"))}
    # And what is exported are the model's weights of before.
    for file, prefix in (("user_encoder.pt2", "encoder."), ("pair_head.pt2", "")):
        weights = load_program(tmp_path / "model" / file).state_dict
        own = {name: value for name, value in weights.items() if not name.startswith("projection.")}
        assert len(own) > 5
        for name, value in own.items():
            assert value.numpy(force=True).tobytes() == seen["before"][prefix + name]


def test_the_job_reads_what_was_known_and_exports_a_model(tables, fill, make_run, root, caplog):
    rows = [
        log_row(
            user, item, AS_OF - hours(30 - step), clicked=item % 3 == 0, shown=item < 4, request_id=f"{user}-{step}"
        )
        for user in range(8)
        for step in range(5)
        for item in range(6)
    ]
    fill("ranking_log", rows, AS_OF)
    fill("ranking_log", [log_row(0, 3, AS_OF + hours(1), clicked=True)], AS_OF + hours(6))
    fill(
        "label_events",
        [
            {
                "request_id": request,
                "item_id": 0,
                "value": value,
                "occurred_at": AS_OF - hours(9),
                "arrived_at": AS_OF - hours(8),
            }
            for request, value in (("0-0", 1.0), ("0-1", 0.0))
        ],
        AS_OF,
    )
    fill("items", [{"item_id": item, "category_id": item} for item in range(6)])

    labels = tables.read("label_events")
    found = {
        row.user_id: row
        for row in job.user_sequences(job.with_conversions(log_before(tables, AS_OF), labels)).collect()
    }
    assert len(found) == 8
    assert [(e.time - micros(AS_OF), e.item_id, e.clicked, e.converted) for e in found[0].events[:5]] == [
        (-30 * HOUR, 0, True, True),
        (-30 * HOUR, 1, False, False),
        (-30 * HOUR, 2, False, False),
        (-30 * HOUR, 3, True, False),
        (-29 * HOUR, 0, True, False),
    ]
    assert [(r.time - micros(AS_OF), r.scored) for r in found[0].requests] == [
        ((step - 30) * HOUR, 6) for step in range(5)
    ]
    kept = {row.user_id for row in job.sampled_users(log_before(tables, AS_OF), 0.5, 1).collect()}
    assert 0 < len(kept) < 8 and kept == {
        row.user_id for row in job.sampled_users(log_before(tables, AS_OF).repartition(3), 0.5, 1).collect()
    }

    run, settings = make_run(
        "train_foundation",
        AS_OF,
        "train_foundation.size=tiny",
        "train_foundation.epochs=1",
        "train_foundation.embedding_dim=4",
    )
    report = job.run(run, settings)
    assert (report.rows_in, report.rows_out) == (160, 160)
    assert report.metrics["train_rows"] + report.metrics["validation_rows"] == 160
    assert {file.name for file in (root / "models" / "foundation" / "20260103T000000Z").iterdir()} == {
        "model.json",
        "pair_head.pt2",
        "user_encoder.pt2",
    }
    with pytest.raises(RunFailed, match="no shown row"):
        job.run(*make_run("train_foundation", AS_OF - hours(100)))


@pytest.mark.slow
def test_two_processes_train_one_model(fill, make_run, root):
    rows = [
        log_row(
            user,
            item,
            AS_OF - hours(30 - step),
            clicked=(item + step) % 3 == 0,
            request_id=f"{user}-{step}",
            shown=True,
        )
        for user in range(8)
        for step in range(6)
        for item in range(3)
    ]
    fill("ranking_log", rows, AS_OF)
    fill("items", [{"item_id": item, "category_id": item} for item in range(3)])
    options = [
        f"train_foundation.{option}"
        for option in ("size=tiny", "epochs=1", "embedding_dim=4", "batch=8", "validation=0.2")
    ]
    run, settings = make_run("train_foundation", AS_OF, *options, "train_foundation.workers=2")
    report = job.run(run, settings)
    # Six times of 24 rows each: the last one validates.
    assert (report.metrics["train_rows"], report.metrics["validation_rows"]) == (120, 24)
    assert report.metrics["epochs"] == 1 and 0 < report.metrics["validation_log_loss"] < 2
    assert check_model(root / "models" / "foundation" / "20260103T000000Z") == []
