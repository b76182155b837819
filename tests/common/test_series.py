from datetime import UTC, datetime

import pytest

from jobs.common.clock import slice_of, steps
from jobs.common.errors import UserError
from jobs.common.series import due, plan
from tests.conftest import hours

T0 = datetime(2026, 1, 3, tzinfo=UTC)
SERIES = [("every", "slice"), ("first", "once"), ("day", "daily")]


def names(planned):
    return [(step.job, int((step.as_of - T0).total_seconds() // 3600)) for step in planned]


def test_steps_include_both_ends():
    assert steps(T0, T0 + hours(12), 6) == [T0, T0 + hours(6), T0 + hours(12)]
    assert steps(T0, T0 + hours(11), 6) == [T0, T0 + hours(6)]
    assert steps(T0, T0, 6) == [T0]
    with pytest.raises(UserError, match="before --from"):
        steps(T0, T0 - hours(1), 6)


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
