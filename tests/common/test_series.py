import threading
from datetime import UTC, datetime

import pytest

from jobs.common.clock import slice_of, steps
from jobs.common.config import load_config
from jobs.common.errors import UserError
from jobs.common.series import SERIES as REAL
from jobs.common.series import Entry, Step, due, in_turn, plan, ready, remaining, run_series
from tests.conftest import hours

T0 = datetime(2026, 1, 3, tzinfo=UTC)
SERIES = [Entry("every"), Entry("first", "once"), Entry("day", "daily")]


def names(planned):
    return [(step.job, int((step.as_of - T0).total_seconds() // 3600)) for step in planned]


def test_steps_include_both_ends():
    assert steps(T0, T0 + hours(12), 6) == [T0, T0 + hours(6), T0 + hours(12)]
    assert steps(T0, T0 + hours(11), 6) == [T0, T0 + hours(6)]
    assert steps(T0, T0, 6) == [T0]
    with pytest.raises(UserError, match="before --from"):
        steps(T0, T0 - hours(1), 6)
    with pytest.raises(UserError, match=r"8,759,761 slices of 1 h.* is --to right\?"):
        steps(T0, T0 + hours(8_759_760), 1)


def test_a_plan_runs_slice_by_slice_in_the_order_of_the_series():
    planned = names(plan([T0, T0 + hours(12), T0 + hours(24)], set(), SERIES))
    assert planned == [("every", 0), ("first", 0), ("day", 0), ("every", 12), ("every", 24), ("day", 24)]


def test_a_plan_made_again_after_a_kill_names_the_same_steps():
    moments = [T0, T0 + hours(12), T0 + hours(24)]
    fresh = plan(moments, set(), SERIES)
    for done in range(len(fresh)):
        finished = {(step.job, slice_of(step.as_of)) for step in fresh[:done]}
        assert plan(moments, finished, SERIES) == fresh


def test_daily_jobs_count_from_their_last_run_in_logical_time():
    assert due("daily", T0, [])
    assert not due("daily", T0 + hours(23), [T0])
    assert due("daily", T0 + hours(24), [T0])
    assert due("daily", T0, [T0 + hours(1)])
    assert not due("once", T0 + hours(500), [T0])
    assert due("once", T0, [T0])


def test_the_real_series_waits_only_for_jobs_before_it():
    before = {"join_features"}
    for entry in REAL:
        assert set(entry.after) <= before, entry
        before.add(entry.job)


def test_a_step_is_ready_when_nothing_unfinished_holds_it_back():
    a, b, c, d = Step("a", T0), Step("b", T0, ("a",)), Step("c", T0, ("a", "absent")), Step("d", T0, ("b", "c"))
    assert ready([a, b, c, d], []) == [a]
    assert ready([b, c, d], [a]) == []
    assert ready([b, c, d], []) == [b, c]
    assert ready([c, d], [b]) == [c]
    assert ready([d], [c]) == []
    assert [entry.after for entry in in_turn(["x", "y", "z"])] == [(), ("x",), ("x", "y")]


@pytest.fixture
def trace(monkeypatch):
    """Runs steps through a stand-in for the jobs: [(job, hour, "start" or "end")] in the order of time."""
    events, lock = [], threading.Lock()

    def run(series, moments, parallel, skip=frozenset(), fails=()):
        together = threading.Barrier(2, timeout=30)

        def execute(job, spark, config, as_of):
            hour = int((as_of - T0).total_seconds() // 3600)
            with lock:
                events.append((job, hour, "start"))
            if job in ("left", "right") and parallel > 1:
                together.wait()  # passes only if both run at the same time
            if job in fails:
                raise ValueError(job)
            with lock:
                events.append((job, hour, "end"))
            return (job, hour)

        monkeypatch.setattr("jobs.common.series.execute", execute)
        config = load_config(overrides=[f"spark.parallel_jobs={parallel}"], environ={})
        return list(run_series(None, config, remaining(plan(moments, set(), series), set(skip))))

    run.events = events
    return run


DIAMOND = [
    Entry("top"),
    Entry("left", after=("top",)),
    Entry("right", after=("top",)),
    Entry("bottom", after=("left", "right")),
]


@pytest.mark.parametrize("parallel", [1, 2])
def test_steps_run_side_by_side_but_never_before_what_they_wait_for(trace, parallel):
    done = trace(DIAMOND, [T0, T0 + hours(6)], parallel)
    assert sorted(done) == sorted((entry.job, hour) for entry in DIAMOND for hour in (0, 6))
    place = {event: number for number, event in enumerate(trace.events)}
    for hour in (0, 6):
        for entry in DIAMOND:
            for job in entry.after:
                assert place[job, hour, "end"] < place[entry.job, hour, "start"]
    assert place["bottom", 0, "end"] < place["top", 6, "start"]


def test_what_succeeded_before_is_left_out_and_holds_nothing_back(trace):
    skip = {("top", slice_of(T0)), ("left", slice_of(T0))}
    assert trace(DIAMOND, [T0], 1, skip) == [("right", 0), ("bottom", 0)]


def test_the_first_error_lets_the_step_beside_it_end_and_starts_no_other(trace):
    with pytest.raises(ValueError, match="left"):
        trace(DIAMOND, [T0, T0 + hours(6)], 2, fails=("left",))
    assert ("right", 0, "end") in trace.events
    assert {job for job, *_ in trace.events} == {"top", "left", "right"}
