import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import functions as F

from jobs import aggregate_users, maintain_tables
from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from jobs.common.log import histories_at
from jobs.common.retention import KEPT_WHOLE, first_kept_slice, removable_snapshots
from schemas import TABLES
from tests.conftest import AS_OF, hours, log_row
from tests.jobs.test_aggregate_users import pair, use_model


def days(count):
    return timedelta(days=count)


def snapshot(moment):
    return f"{slice_of(moment)}-m1-abc"


def test_retention_is_at_least_what_jobs_and_the_live_snapshot_read(make_config):
    config = make_config("serving.ttl_hours=24", "serving.max_user_age_hours=48", "window.hours=6")
    slices = [slice_of(AS_OF - hours(6 * step)) for step in range(100)]

    def first_kept(table, keep_days, as_of=AS_OF, live=None, names=slices):
        return first_kept_slice(table, names, as_of, live, keep_days, config)

    assert first_kept("pair_embeddings", 10) == slice_of(AS_OF - days(10))
    # One day is less than the 48 h that a user-level vector is served and two windows.
    assert first_kept("pair_embeddings", 1) == slice_of(AS_OF - hours(60))
    assert first_kept("user_embeddings", 1) == slice_of(AS_OF - days(30))  # find_neighbors.embedding_days
    assert first_kept("ranking_log", 1) == slice_of(AS_OF - days(7))  # find_neighbors.days
    config = make_config(f"serving.tiers={[*config.serving.tiers, 'cold']}", "export_snapshot.cold_days=9")
    assert first_kept("ranking_log", 1) == slice_of(AS_OF - days(9))
    assert first_kept("training_rows", 1) == slice_of(AS_OF - days(1))
    # Counted from the newest slice if as_of is far ahead of it, from a backfill's as_of, from the live snapshot.
    assert first_kept("training_rows", 1, as_of=AS_OF + days(400)) == slice_of(AS_OF - days(1))
    assert first_kept("training_rows", 1, as_of=AS_OF - days(10)) == slice_of(AS_OF - days(11))
    assert first_kept("pair_embeddings", 1, live=slice_of(AS_OF - days(5))) == slice_of(AS_OF - days(5) - hours(60))
    assert first_kept("pair_embeddings", 1, names=[]) is None
    assert first_kept("pair_embeddings", 1, names=[slice_of(AS_OF + hours(6))]) is None


def test_snapshots_that_somebody_needs_stay():
    times = [AS_OF - hours(6 * step) for step in range(12, -1, -1)]
    names = [snapshot(moment) for moment in times]

    def removed(current=AS_OF, pinned=(), leased=(), as_of=AS_OF, keep=2, keep_days=1.0):
        live = snapshot(current) if current else None
        found = removable_snapshots(names, live, set(pinned), set(leased), as_of, keep=keep, days=keep_days)
        return [times[names.index(name)] for name in found]

    # The day before the newest: 0..24 h. At its start the one of 30 h may still have been live.
    assert removed() == [moment for moment in times if moment < AS_OF - hours(30)]
    assert removed(keep=12) == times[:1]
    assert removed(pinned=[names[0]], leased=[names[3]]) == [times[1], times[2], *times[4:7]]
    assert removed(current=AS_OF - hours(60)) == []  # rolled back: everything since stays, and a day before
    assert removed(as_of=AS_OF - hours(36)) == [times[0]]  # a backfill's as_of: its last day is 36..60 h ago
    assert removed(as_of=AS_OF + days(999)) == removed()
    assert removed(current=None) == [] and removed(current=AS_OF + days(1)) == []
    assert removable_snapshots([*names, "notes"], names[-1], set(), set(), AS_OF, keep=2, days=1.0) == names[:7]


@pytest.mark.parametrize(
    "override, message",
    [
        ("maintain_tables.vacuum_hours=100", "below 168.0 \\(Delta's own limit; allow_short_vacuum"),
        ("maintain_tables.retention_days={items=3}", "an item's latest row may stand in its oldest slice"),
        ("maintain_tables.retention_days={job_runs=3}", "history of the runs"),
        ("maintain_tables.retention_days={pairs=3}", "unknown table 'pairs'"),
        ("maintain_tables.retention_days={training_rows=0}", "is no number of days"),
        ('maintain_tables.tables=["pairs"]', "unknown tables \\['pairs'\\]"),
    ],
)
def test_settings_that_would_lose_data_are_refused(make_config, override, message):
    with pytest.raises(UserError, match=message):
        make_config(override)
    assert set(KEPT_WHOLE) < set(TABLES)


def test_vacuum_may_go_below_a_week_only_when_allowed_and_never_below_the_minimum(make_config):
    make_config("maintain_tables.allow_short_vacuum=true", "maintain_tables.vacuum_hours=24")
    with pytest.raises(UserError, match=r"vacuum_hours = 23.0 is below 24.0"):
        make_config("maintain_tables.allow_short_vacuum=true", "maintain_tables.vacuum_hours=23")


def everything_below(root):
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}


def files_per_slice(tables, name):
    files = tables.read(name).inputFiles()
    folders = [str(Path(file).parent).rpartition("slice=")[2] for file in files]
    return {folder: folders.count(folder) for folder in folders}


def test_what_is_needed_survives_and_the_rest_goes(make_run, tables, fill, root, spark, monkeypatch):
    finished, current_slice = AS_OF - hours(6), AS_OF
    for moment in (AS_OF - days(20), AS_OF - hours(66), AS_OF - hours(60)):
        fill("pair_embeddings", [pair(1, 1, [1, 2])], moment)
    for moment in (finished, current_slice):
        fill("pair_embeddings", [pair(user, 1, [user, 2]) for user in range(8)], moment)
        rows = tables.read_slice("pair_embeddings", moment).localCheckpoint()
        tables.replace(rows.repartition(8), "pair_embeddings", slice=slice_of(moment))
    history = {"shown": [], "clicked": [], "requests": 1, "scored_rows": 1, "shown_rows": 0, "clicked_rows": 0}
    for age, checkpoint in ((30, True), (12, True), (8, False), (0, False)):
        moment = AS_OF - days(age)
        more = {"user_id": age, "last_event_time": moment - hours(1), "checkpoint": checkpoint}
        fill("user_histories", [{**history, **more}], moment)
    fill("ranking_log", [log_row(1, 1, AS_OF - days(91))], AS_OF - days(90))
    fill(
        "snapshots",
        [
            {
                "snapshot_id": snapshot(moment),
                "model_version": "m1",
                "live_from": moment,
                "status": "live",
                "pairs": 1,
                "users_own": 1,
                "users_neighbor": 0,
                "bytes": 1,
                "manifest_sha256": "0",
            }
            for moment in (AS_OF - days(9),)
        ],
        AS_OF - days(9),
    )

    folder = root / "snapshots"
    moments = [AS_OF - days(age) for age in (9, 8, 7, 6, 1)] + [AS_OF]
    for moment in moments:
        (folder / snapshot(moment)).mkdir(parents=True)
        (folder / snapshot(moment) / "manifest.json").write_text("{}")
    (folder / "CURRENT").write_text(snapshot(AS_OF) + "\n")
    (folder / "PINNED").write_text(f"# kept for the audit\n{snapshot(AS_OF - days(8))}  # by hand\n")
    (folder / ".leases").mkdir()
    (folder / ".leases" / f"{snapshot(AS_OF - days(7))}.ranker-1").touch()
    old_lease = folder / ".leases" / f"{snapshot(AS_OF - days(6))}.ranker-2"
    old_lease.touch()
    for stale in (old_lease, folder / ".staging-x"):
        stale.is_file() or stale.mkdir()
        os.utime(stale, (time.time() - 3 * 86400,) * 2)
    (folder / ".staging-y").mkdir()

    overrides = [
        "maintain_tables.retention_days={pair_embeddings=1, user_histories=10, rejected_rows=1}",
        "maintain_tables.max_files_per_slice=1",
        "maintain_tables.keep_snapshots=1",
        "maintain_tables.snapshot_days=0.5",
    ]
    before = everything_below(root)
    only_said = (*overrides, "maintain_tables.dry_run=true")
    planned = maintain_tables.run(*make_run("maintain_tables", AS_OF, *only_said)).metrics
    assert everything_below(root) == before
    # 20 days and 66 h are past the 60 h that are needed; of the histories, all before the checkpoint of 12 days ago.
    assert (planned["dry_run"], planned["slices_deleted"], planned["snapshots_removed"]) == (1.0, 3.0, 2.0)

    # Ten days later by the wall clock vacuum is due: orphans go, files that readers may still use stay a week.
    path = Path(tables.path("pair_embeddings"))
    orphan = path / f"slice={slice_of(finished)}" / "part-orphan.snappy.parquet"
    orphan.write_bytes(b"left by a killed task")
    for file in path.rglob("*.parquet"):
        os.utime(file, (time.time() - 10 * 86400,) * 2)
    version = spark.sql(f"DESCRIBE HISTORY delta.`{path}`").agg(F.max("version")).first()[0]
    monkeypatch.setattr(maintain_tables, "wall_clock", lambda: datetime.now(UTC) + days(10))
    done = maintain_tables.run(*make_run("maintain_tables", AS_OF, *overrides)).metrics
    assert (done["slices_deleted"], done["snapshots_removed"], done["snapshots_kept"]) == (3.0, 2.0, 4.0)
    left = [AS_OF - hours(60), finished, current_slice]
    assert tables.slices("pair_embeddings") == [slice_of(moment) for moment in left]
    rows = tables.read_slice("pair_embeddings", finished).orderBy("user_id").collect()
    assert [np.frombuffer(row.embedding, "<f2").tolist() for row in rows] == [[user, 2] for user in range(8)]
    counts = files_per_slice(tables, "pair_embeddings")
    assert counts[slice_of(finished)] == 1 and counts[slice_of(current_slice)] > 1  # the run's own is left alone
    assert not orphan.exists()
    # A reader that opened the table before sees its version whole.
    old = spark.read.format("delta").option("versionAsOf", version).load(str(path))
    assert old.count() == 19 and old.select("embedding").distinct().count() > 1
    assert [row.user_id for row in histories_at(tables, AS_OF - days(10)).collect()] == [12]
    assert {row.user_id for row in histories_at(tables, AS_OF).collect()} == {12, 8, 0}
    assert tables.read("ranking_log").count() == 1
    kept = {path.name for path in folder.iterdir() if path.is_dir()}
    assert kept == {".leases", ".staging-y", *(snapshot(AS_OF - days(age)) for age in (8, 7, 1, 0))}
    assert [row.status for row in tables.read("snapshots").collect()] == ["retired"]
    assert json.loads((folder / snapshot(AS_OF) / "manifest.json").read_text()) == {}

    again = maintain_tables.run(*make_run("maintain_tables", AS_OF, *overrides)).metrics
    assert (again["slices_deleted"], again["snapshots_removed"], again.get("files_removed", 0)) == (0, 0, 0)


def test_a_job_beside_it_reads_whole_slices_and_no_row_is_lost(make_run, tables, fill, spark, monkeypatch):
    """Compaction and vacuum go on in another session while slices are written again and aggregate_users reads."""
    use_model(monkeypatch, "m1")
    monkeypatch.setattr(maintain_tables, "wall_clock", lambda: datetime.now(UTC) + days(10))  # so that vacuum is due
    run, settings = make_run(
        "maintain_tables",
        AS_OF,
        "maintain_tables.max_files_per_slice=1",
        'maintain_tables.tables=["pair_embeddings", "user_embeddings"]',
    )
    run = replace(run, spark=spark.newSession())
    done, figures = threading.Event(), []

    def maintain():
        while not done.is_set():
            figures.append(maintain_tables.run(run, settings).metrics)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(maintain)
        try:
            for turn in range(1, 5):
                for moment, item in ((AS_OF - hours(6), 1), (AS_OF, 2)):
                    fill("pair_embeddings", [pair(user, item, [turn, user * item]) for user in range(6)], moment)
                    rows = tables.read_slice("pair_embeddings", moment).localCheckpoint()
                    tables.replace(rows.repartition(6), "pair_embeddings", slice=slice_of(moment))
                aggregate_users.run(*make_run("aggregate_users"))
                means = tables.read_slice("user_embeddings", AS_OF).orderBy("user_id").collect()
                found = [np.frombuffer(row.embedding, "<f2").tolist() for row in means]
                assert found == [[turn, 1.5 * user] for user in range(6)]
        finally:
            done.set()
        beside.result()
    assert sum(each.get("files_removed", 0) for each in figures) > 0
    assert sum(each.get("vacuumed", 0) for each in figures) > 0
    assert tables.read("pair_embeddings").count() == 12
