"""Which run a raw row belongs to.

Let t be a run's as_of and p the as_of of the latest ranking_log slice before it (none at first).

* A row is *visible* at a time m if event_time < m and arrived_at <= m. It belongs to the run at t if it is visible at t
  and was not visible at p. Rows not yet visible wait; they are not touched.
* Where the arrival is unknown (no arrived_at), a row arrived when it happened. Only if it is older than p and no other
  slice holds it, it was found late: then arrived_at = t. Rows older than `late_days` before p are taken as held, for
  looking further back would compare the whole log in every run; 0 days means no limit.
* A row is *from the future*, whatever the run, if event_time > arrived_at + skew. Where the arrival is unknown and the
  log is live (not a replay), it is if event_time >= t + max_ahead.
* A refused row belongs to the run in which it arrived; if that is unknown, to the first run that meets it. So a refused
  row is recorded once, and one that names no time at all is too.
* One row per key is kept: none that another slice holds, and within the run the first by (arrived_at, event_time,
  everything else). A row that was refused never comes in later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts

STATE = "state"
NEW, LATE, WAITING, HELD, REFUSED, UNDATED = "new", "late", "waiting", "held", "refused", "undated"
KEPT, DUPLICATE = "kept", "duplicate"


@dataclass(frozen=True)
class Moment:
    """What decides which rows belong to a run."""

    as_of: datetime
    previous: datetime | None
    replay: bool
    skew: timedelta
    max_ahead: timedelta
    late: timedelta | None

    @property
    def lookback(self) -> datetime | None:
        """Slices after this one can hold a row that the run may bring; None: any."""
        return (self.previous or self.as_of) - self.late if self.late else None


def visible(event_time: Column, arrived_at: Column, moment: datetime) -> Column:
    """Whether a run at that moment knows the row; an unknown arrival is the event's time."""
    return (event_time < ts(moment)) & (F.coalesce(arrived_at, event_time) <= ts(moment))


def future_fault(event_time: Column, arrived_at: Column, moment: Moment) -> Column:
    """Why a row is from the future, or null. With an unknown time, null."""
    ahead = F.unix_micros(event_time) - F.unix_micros(arrived_at)
    fault = F.when(
        ahead > moment.skew // timedelta(microseconds=1), F.lit("from the future: event_time is after arrived_at")
    )
    if not moment.replay:
        fault = fault.when(
            arrived_at.isNull() & (event_time >= ts(moment.as_of + moment.max_ahead)),
            F.lit("from the future: event_time is after as_of"),
        )
    return fault


def classify(rows: DataFrame, moment: Moment) -> DataFrame:
    """Adds STATE to rows with event_time, arrived_at (null: unknown) and fault (null: none), and settles arrived_at.

    NEW belongs to this run; LATE does if no other slice holds it; WAITING comes later; HELD came earlier; REFUSED is a
    fault that arrived now; UNDATED is one of which that can't be known.
    """
    event_time, arrived_at = F.col("event_time"), F.col("arrived_at")
    future = future_fault(event_time, arrived_at, moment)
    rows = rows.withColumn("fault", F.coalesce("fault", future))
    faulty, known = F.col("fault").isNotNull(), arrived_at.isNotNull()
    seen = visible(event_time, arrived_at, moment.as_of)
    nothing = F.lit(False)
    if moment.previous is None:
        arrived_before, seen_before, findable = nothing, nothing, nothing
    else:
        arrived_before = known & (arrived_at <= ts(moment.previous))
        seen_before = visible(event_time, arrived_at, moment.previous)
        findable = ~known if moment.lookback is None else ~known & (event_time >= ts(moment.lookback))
    state = (
        F.when(faulty & known & (arrived_at > ts(moment.as_of)), WAITING)
        .when(faulty & arrived_before, HELD)
        .when(faulty & known, REFUSED)
        .when(faulty & event_time.isNull(), UNDATED)
        .when(faulty & future.isNotNull(), REFUSED)
        .when(faulty & (event_time >= ts(moment.as_of)), WAITING)
        .when(faulty, REFUSED)
        .when(~seen, WAITING)
        .when(seen_before & findable, LATE)
        .when(seen_before, HELD)
        .otherwise(NEW)
    )
    settled = F.when(F.col(STATE) == LATE, ts(moment.as_of)).otherwise(F.coalesce(arrived_at, event_time))
    return rows.withColumn(STATE, state).withColumn("arrived_at", settled)


def keep_first(rows: DataFrame, key: Sequence[str], held: DataFrame | None, ties: Sequence[Column]) -> DataFrame:
    """Sets STATE of NEW and LATE rows to KEPT, DUPLICATE or HELD; others keep theirs.

    held: the keys in other slices, distinct. A LATE row that is held is no duplicate: it is what the run that holds it
    brought. ties: what orders rows of one key after arrived_at and event_time.
    """
    good = F.col(STATE).isin(NEW, LATE)
    if held is None:
        rows = rows.withColumn("_held", F.lit(False))
    else:
        held = held.select(*key).withColumn("_held", F.lit(True))
        rows = rows.join(held, on=list(key), how="left").withColumn("_held", F.coalesce("_held", F.lit(False)))
    # Refused rows often have no key; one partition each keeps them from meeting in one task.
    alone = F.when(~good, F.xxhash64("raw"))
    order = Window.partitionBy(*key, alone, "_held").orderBy("arrived_at", "event_time", *ties)
    state = (
        F.when(~good, F.col(STATE))
        .when(F.col("_held") & (F.col(STATE) == LATE), HELD)
        .when(F.col("_held") | (F.row_number().over(order) > 1), DUPLICATE)
        .otherwise(KEPT)
    )
    return rows.withColumn(STATE, state).drop("_held")


def other_slices(table: DataFrame, moment: Moment) -> DataFrame:
    """The rows of a log table in slices that are not the run's own and that can hold its rows."""
    rows = table.where(F.col("slice") != slice_of(moment.as_of))
    return rows if moment.lookback is None else rows.where(F.col("slice") > slice_of(moment.lookback))


def never_refused(rows: DataFrame, rejected: DataFrame) -> DataFrame:
    """rows (raw, fault, ...) without the good ones whose text another run refused: in a live log without arrival times,
    a row from the future would come in once its time has come."""
    known = rejected.select(F.col("row").alias("_refused")).distinct()
    return rows.join(known, on=F.col("fault").isNull() & (F.col("raw") == F.col("_refused")), how="left_anti")


def not_refused_before(refused: DataFrame, rejected: DataFrame) -> DataFrame:
    """The refused rows (raw, ...) whose text no other run has recorded. rejected: other slices' rejected_rows."""
    known = rejected.select(F.col("row").alias("raw")).distinct()
    return refused.join(known, on="raw", how="left_anti")
