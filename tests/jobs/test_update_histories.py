"""Histories, slice by slice, against a computation over the whole log in plain Python."""

import random
from datetime import UTC, timedelta

import pytest

from jobs.common.clock import slice_of
from jobs.common.log import histories_at
from jobs.update_histories import needs_checkpoint
from jobs.update_histories import run as update
from tests.conftest import AS_OF, hours

KEEP = 3
STEPS = [AS_OF + hours(6) * step for step in range(4)]


def random_log(seed, users):
    """Rows by ingest slice: about a third come late, times and items repeat so that ties occur, requests get split."""
    rng = random.Random(seed)
    by_slice = {as_of: [] for as_of in STEPS}
    for user in range(users):
        seen = set()
        for _ in range(rng.choice([1, 2, 5, 12])):
            start = rng.randrange(len(STEPS))
            event = STEPS[start] - hours(rng.choice([1, 2, 3, 4, 5]))
            slice_ = STEPS[min(start + (rng.random() < 0.35) * rng.choice([1, 2]), len(STEPS) - 1)]
            item, request = rng.randrange(5), f"{user}-{event.timestamp():.0f}-{rng.randrange(2)}"
            if (request, item) in seen:
                continue
            seen.add((request, item))
            shown = rng.random() < 0.7
            by_slice[slice_].append(
                {
                    "request_id": request,
                    "event_time": event,
                    "arrived_at": slice_,
                    "user_id": user - 5,
                    "item_id": item,
                    "shown": shown,
                    "clicked": shown and rng.random() < 0.4,
                }
            )
    return by_slice


def expected(rows, keep):
    """user -> (shown, clicked, requests, scored, shown rows, clicked rows, last event)."""
    found = {}
    for user in {row["user_id"] for row in rows}:
        mine = [row for row in rows if row["user_id"] == user]

        def last(flag, *names, mine=mine):
            picked = sorted((row["event_time"], row["item_id"], row["clicked"]) for row in mine if row[flag])[-keep:]
            order = {"event_time": 0, "item_id": 1, "clicked": 2}
            return [tuple(event[order[name]] for name in names) for event in picked]

        found[user] = (
            last("shown", "item_id", "event_time", "clicked"),
            last("clicked", "item_id", "event_time"),
            len({row["request_id"] for row in mine}),
            len(mine),
            sum(row["shown"] for row in mine),
            sum(row["clicked"] for row in mine),
            max(row["event_time"] for row in mine),
        )
    return found


def state(rows):
    def events(array):
        return [
            tuple(value.replace(tzinfo=UTC) if hasattr(value, "tzinfo") else value for value in event)
            for event in array
        ]

    return {
        row.user_id: (
            events(row.shown),
            events(row.clicked),
            row.requests,
            row.scored_rows,
            row.shown_rows,
            row.clicked_rows,
            row.last_event_time.replace(tzinfo=UTC),
        )
        for row in rows.collect()
    }


def test_slice_by_slice_equals_the_whole_log_at_once(spark, make_run, tables, fill):
    log = random_log(seed=1, users=150)
    options = (
        f"update_histories.shown_events={KEEP}",
        f"update_histories.clicked_events={KEEP}",
        "update_histories.checkpoint_hours=12",
    )
    so_far, reports = [], []
    for as_of in STEPS:
        fill("ranking_log", log[as_of], as_of)
        so_far += log[as_of]
        run, settings = make_run("update_histories", as_of, *options)
        reports.append(update(run, settings))
        wanted = expected(so_far, KEEP)
        assert state(histories_at(tables, as_of)) == wanted
        active = {row["user_id"] for row in log[as_of]}
        assert reports[-1].rows_in == len(log[as_of])  # a late row counts where it becomes visible
        assert reports[-1].metrics["active_users"] == len(active)
        checkpoint = as_of in (STEPS[0], STEPS[2])
        written = tables.read_slice("user_histories", as_of)
        assert {(row.user_id, row.checkpoint) for row in written.select("user_id", "checkpoint").collect()} == {
            (user, checkpoint) for user in (wanted if checkpoint else active)
        }

    # A rerun in the middle, and under another partitioning, changes nothing; nor does computing all anew.
    before = state(tables.read_slice("user_histories", STEPS[1]))
    spark.conf.set("spark.sql.shuffle.partitions", "5")
    try:
        run, settings = make_run("update_histories", STEPS[1], *options)
        update(run, settings)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    assert state(tables.read_slice("user_histories", STEPS[1])) == before
    run, settings = make_run("update_histories", STEPS[3], *options, "update_histories.rebuild=true")
    update(run, settings)
    assert state(tables.read_slice("user_histories", STEPS[3])) == expected(so_far, KEEP)
    # Nothing new and no checkpoint due: nothing is written.
    run, settings = make_run("update_histories", STEPS[3] + hours(6), *options)
    assert update(run, settings).rows_out == 0
    assert tables.last_slice("user_histories") == slice_of(STEPS[3])


@pytest.mark.parametrize(("last", "due"), [(None, True), (AS_OF - hours(24), True), (AS_OF - hours(23.5), False)])
def test_a_checkpoint_is_due_by_the_tables_own_state(last, due):
    assert needs_checkpoint(AS_OF, last and slice_of(last), timedelta(hours=24)) is due
