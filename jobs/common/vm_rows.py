"""Rows for a small online model: training rows with the cheap counters that were known when their window began."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import as_of_of, slice_of, ts
from jobs.common.log import log_between
from jobs.common.tables import Tables

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from solaris_udf.foundation.items import ItemTable
    from solaris_udf.vertical_rows import Rows

STATE = ("shown", "clicked", "requests", "scored_rows", "shown_rows", "clicked_rows")
SERVED = (
    "tier",
    "age_seconds",
    "similarity",
    "embedding",
    "user_tier",
    "user_age_seconds",
    "user_similarity",
    "user_embedding",
)
# What the foundation model and the simulated world say of a row: click probabilities, and the pair's vector.
FORETOLD = ("soft", "fresh", "truth", "vector")


def shown_rows(tables: Tables, start: datetime, as_of: datetime, window_hours: float) -> DataFrame:
    """training_rows that were shown, with event_time in [start, as_of), and known_at: when their window began."""
    known_at = F.timestamp_micros(F.unix_micros("as_of") - F.lit(round(window_hours * 3_600_000_000)))
    return (
        tables.read("training_rows")
        .where((F.col("slice") > slice_of(start)) & (F.col("slice") <= slice_of(as_of)) & F.col("shown"))
        .where((F.col("event_time") >= ts(start)) & (F.col("event_time") < ts(as_of)))
        .withColumn("known_at", known_at)
    )


def window_starts(tables: Tables, start: datetime, as_of: datetime, window_hours: float) -> list[datetime]:
    """The known_at values of shown_rows: one a slice."""
    names = [name for name in tables.slices("training_rows") if slice_of(start) < name <= slice_of(as_of)]
    return [as_of_of(name) - timedelta(hours=window_hours) for name in names]


def states_at(tables: Tables, keys: DataFrame, first: datetime, last: datetime) -> DataFrame:
    """keys (user_id, at, ...) with each user's history as it was at `at`, which lies in [first, last].

    Users without any get empty sequences and zeros. One sort by user and time, so that a history is not copied for each
    time it is asked for.
    """
    histories = tables.read("user_histories").where(F.col("slice") <= slice_of(last))
    checkpoint = (
        histories.where("checkpoint")
        .where(F.col("slice") <= slice_of(first))
        .agg(F.max("slice").alias("slice"))
        .first()["slice"]  # type: ignore[index]
    )
    if checkpoint is not None:
        histories = histories.where(F.col("slice") >= checkpoint)
    known = histories.select(
        "user_id", F.col("as_of").alias("at"), F.struct(*STATE).alias("_state"), F.lit(0).alias("_asked")
    )
    asked = keys.withColumn("_asked", F.lit(1))
    # At the same time the history comes first: a slice's history holds what happened before its as_of.
    order = Window.partitionBy("user_id").orderBy("at", "_asked").rowsBetween(Window.unboundedPreceding, 0)
    joined = (
        asked.unionByName(known, allowMissingColumns=True)
        .withColumn("_state", F.last("_state", ignorenulls=True).over(order))
        .where("_asked = 1")
    )
    kinds = {field.name: field.dataType for field in histories.select(*STATE).schema}
    empty = {name: F.array().cast(kinds[name]) if name in STATE[:2] else F.lit(0).cast("bigint") for name in STATE}
    return joined.withColumns({name: F.coalesce(F.col(f"_state.{name}"), empty[name]) for name in STATE}).drop(
        "_state", "_asked"
    )


def states_before(tables: Tables, rows: DataFrame, first: datetime, as_of: datetime) -> DataFrame:
    """(user_id, at, item_ids, STATE) of each moment of rows (user_id, item_id, event_time, as_of): the history then.

    Its events are those of the history at the row's as_of, the window's end, of which a model reads the part before
    `at`. Its counters are those at `first`, which no row is before, and what happened from then to `at`. The rows are
    rows of ranking_log.
    """
    moments = rows.groupBy("user_id", F.col("event_time").alias("moment"), F.col("as_of").alias("at")).agg(
        F.sort_array(F.collect_set("item_id")).alias("item_ids")
    )
    ends = [row["at"].replace(tzinfo=UTC) for row in moments.select("at").distinct().collect()]
    events = states_at(tables, moments, min(ends, default=first), max(ends, default=as_of)).drop(*STATE[2:])
    start = states_at(tables, moments.select("user_id").distinct().withColumn("at", ts(first)), first, first).select(
        "user_id", *STATE[2:]
    )
    before = (
        Window.partitionBy("user_id").orderBy(F.unix_micros("event_time")).rangeBetween(Window.unboundedPreceding, -1)
    )
    since = (
        log_between(tables, first, as_of, as_of)
        .groupBy("user_id", "event_time")
        .agg(
            F.count_distinct("request_id").alias("requests"),
            F.count(F.lit(1)).alias("scored_rows"),
            F.count_if("shown").alias("shown_rows"),
            F.count_if("clicked").alias("clicked_rows"),
        )
        .select(
            "user_id",
            F.col("event_time").alias("moment"),
            *(F.coalesce(F.sum(name).over(before), F.lit(0)).alias(f"_{name}") for name in STATE[2:]),
        )
    )
    joined = events.join(start, "user_id", "left").join(since, ["user_id", "moment"], "left")
    counters = {name: F.coalesce(name, F.lit(0)) + F.coalesce(f"_{name}", F.lit(0)) for name in STATE[2:]}
    return joined.withColumns(counters).select("user_id", F.col("moment").alias("at"), "item_ids", *STATE)


def item_counts(tables: Tables, times: Sequence[datetime], hours: float) -> DataFrame:
    """(item_id, known_at, item_shown, item_clicked): each item's rows of the hours before each time, as known then."""
    span = timedelta(hours=hours)
    first, last = min(times) - span, max(times)
    moments = F.array(*(ts(moment) for moment in times))
    lower = F.lit(int(span / timedelta(microseconds=1)))
    log = tables.read("ranking_log").where(
        (F.col("slice") > slice_of(first))
        & (F.col("slice") <= slice_of(last))
        & F.col("shown")
        & (F.col("event_time") >= ts(first))
        & (F.col("event_time") < ts(last))
    )
    seen = F.filter(
        moments,
        lambda at: (
            (F.col("event_time") < at)
            & (F.col("arrived_at") <= at)
            & (F.unix_micros(at) - F.unix_micros("event_time") <= lower)
        ),
    )
    return (
        log.select("item_id", "clicked", F.explode(seen).alias("known_at"))
        .groupBy("item_id", "known_at")
        .agg(F.count(F.lit(1)).alias("item_shown"), F.sum(F.col("clicked").cast("bigint")).alias("item_clicked"))
    )


def with_counters(rows: DataFrame, states: DataFrame, counts: DataFrame) -> DataFrame:
    """rows (user_id, item_id, known_at, ...) with user_requests, user_shown, user_clicked, item_shown, item_clicked."""
    user = states.select(
        "user_id",
        F.col("at").alias("known_at"),
        F.col("requests").alias("user_requests"),
        F.col("shown_rows").alias("user_shown"),
        F.col("clicked_rows").alias("user_clicked"),
    )
    return (
        rows.join(user, ["user_id", "known_at"], "left")
        .join(counts, ["item_id", "known_at"], "left")
        .fillna(0, ["user_requests", "user_shown", "user_clicked", "item_shown", "item_clicked"])
    )


@dataclass(frozen=True)
class Collected:
    """Rows on the driver in the order of time, with what the model must not see beside them.

    user int64 [n]: the user's number among these rows, from 0; event_time int64 [n], micros UTC. NaN where unknown:
    truth float64 [n], the world's click probability; fresh float64 [n], the foundation model's with the history up to
    the row itself; vectors float32 [n, d], its embedding of the row's pair with the history at known_at int64 [n];
    bought_at float64 [n], the share of its slice's budget that bought the served pair (vm_budget.py).
    """

    rows: "Rows"
    user: "np.ndarray[Any, Any]"
    event_time: "np.ndarray[Any, Any]"
    known_at: "np.ndarray[Any, Any]"
    truth: "np.ndarray[Any, Any]"
    fresh: "np.ndarray[Any, Any]"
    vectors: "np.ndarray[Any, Any]"
    bought_at: "np.ndarray[Any, Any]"

    def take(self, index: Any) -> "Collected":
        return Collected(
            self.rows.take(index), *(getattr(self, field.name)[index] for field in fields(self) if field.name != "rows")
        )

    def every_pair(self) -> "Rows":
        """The rows as if each one's own pair had been computed at its window's start."""
        age = ((self.event_time - self.known_at) // 1_000_000).astype("int32")
        return self.rows.with_pairs(self.vectors, age)


def collect(frame: DataFrame, items: "ItemTable", model_version: str) -> Collected:
    """Brings rows (with counters, SERVED, FORETOLD, model_version, bought_at) to the driver through Arrow.

    The caller bounds how many there are.
    Vectors of another model version count as not served: the model can't read two spaces at once.
    """
    import numpy as np

    from solaris_udf.vertical_rows import Context, make_rows, surface_id

    columns = (
        "request_id",
        "item_id",
        "user_id",
        "event_time",
        "surface",
        "clicked",
        "model_version",
        *SERVED,
        "user_requests",
        "user_shown",
        "user_clicked",
        "item_shown",
        "item_clicked",
        "known_at",
        *FORETOLD,
        "bought_at",
    )
    table = (
        frame.select(*columns)
        .toArrow()
        .sort_by([("event_time", "ascending"), ("request_id", "ascending"), ("item_id", "ascending")])
        .combine_chunks()
    )

    def ints(*names: str) -> Any:
        return np.stack([table[name].to_numpy() for name in names], axis=1)

    def floats(name: str) -> Any:
        return table[name].cast("double").to_numpy(zero_copy_only=False).astype(np.float64)

    event_time = table["event_time"].cast("int64").to_numpy()
    user_id = table["user_id"].to_numpy()
    context = Context(
        user_id=user_id,
        item_id=table["item_id"].to_numpy(),
        event_time=event_time,
        surface=surface_id(table["surface"].to_pylist()),
        user_counts=ints("user_requests", "user_shown", "user_clicked"),
        item_counts=ints("item_shown", "item_clicked"),
    )
    label = table["clicked"].to_numpy(zero_copy_only=False).astype(np.float32)
    rows = make_rows(context, items, _lookup(table, model_version), label, floats("soft").astype(np.float32))
    return Collected(
        rows,
        user=np.unique(user_id, return_inverse=True)[1],
        event_time=event_time,
        known_at=table["known_at"].cast("int64").to_numpy(),
        truth=floats("truth"),
        fresh=floats("fresh"),
        vectors=_vectors(table["vector"].combine_chunks(), rows.pair.shape[1]),
        bought_at=floats("bought_at"),
    )


def _vectors(stored: "pa.Array", dim: int) -> Any:
    """float32 [n, dim], NaN for null."""
    import numpy as np

    from solaris_udf.codec import decode

    full = np.full((len(stored), dim), np.nan, np.float32)
    present = np.asarray(stored.is_valid())
    if present.any():
        full[present] = decode(stored.drop_null())
    return full


def _lookup(table: "pa.Table", model_version: str) -> Any:
    """The served columns as the reader returned them."""
    import numpy as np
    import pyarrow.compute as pc

    from solaris_udf.codec import decode
    from solaris_udf.snapshot.lookup import Lookup
    from solaris_udf.tiers import TIER_NAMES

    ours = pc.fill_null(pc.equal(table["model_version"], model_version), False).to_numpy(zero_copy_only=False)

    def codes(name: str) -> Any:
        found = pc.index_in(table[name], value_set=_strings(TIER_NAMES)).to_numpy()
        return np.where(ours, found, 0).astype(np.uint8)

    def vectors(name: str, tier: Any) -> Any:
        stored = table[name].combine_chunks().filter(_mask(tier > 0))
        found = decode(stored)
        return tier > 0, found

    def numbers(name: str, kind: Any, none: float) -> Any:
        return np.where(ours, table[name].to_numpy(), none).astype(kind)

    tier, user_tier = codes("tier"), codes("user_tier")
    parts = [vectors("embedding", tier), vectors("user_embedding", user_tier)]
    dim = max(found.shape[1] for _, found in parts)
    spread = []
    for present, found in parts:
        full = np.zeros((len(table), dim), np.float32)
        if len(found):
            full[present] = found
        spread.append(full)
    return Lookup(
        embedding=spread[0],
        tier=tier,
        age_seconds=numbers("age_seconds", np.int32, -1),
        similarity=numbers("similarity", np.float32, 0),
        user_embedding=spread[1],
        user_tier=user_tier,
        user_age_seconds=numbers("user_age_seconds", np.int32, -1),
        user_similarity=numbers("user_similarity", np.float32, 0),
    )


def _strings(values: Sequence[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(values, pa.string())


def _mask(values: Any) -> "pa.Array":
    import pyarrow as pa

    return pa.array(values)
