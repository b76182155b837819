"""Brings the raw log of a dataset into ranking_log, and its items, later labels and string ids into theirs.

Reads the files that the dataset's mapping names (CSV, TSV, JSON lines, Parquet, Delta; see docs/bring-your-own-log.md).
Each run brings the rows that became visible since the latest slice before it: event_time < as_of, arrived_at <= as_of
(jobs/common/ingest_rules.py has the rules). Of rows of one request and item the first is kept, whatever slice it is in;
the others are counted. Rows that can't be used go to rejected_rows. An item's row is written when it is new or changed,
and not before its created_at. ranking_log is written last: its slices are what tells a later run where to go on.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce

from pydantic import Field
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from jobs.common import ingest_parts as parts
from jobs.common import ingest_rules as rules
from jobs.common.clock import as_of_of, ts
from jobs.common.config import Section
from jobs.common.datasets import Dataset, ItemsPart, load_dataset
from jobs.common.errors import RunFailed, UserError
from jobs.common.ingest_items import count_alike, items_of, new_items, one_per_item, settle_ids
from jobs.common.ingest_read import base_paths, location, read_source, reading, with_raw
from jobs.common.log import latest_per
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.side_by_side import side_by_side
from schemas import TABLES

LOG_KEY = ("request_id", "item_id")
LABEL_KEY = ("request_id", "item_id", "label")
LOG_TIES = ("user_id", "user_group", "surface", "position", "shown", "clicked", "served_embedding")
OWN = {
    name: [column for column in TABLES[name].column_names if column not in ("slice", "as_of", "run_id")]
    for name in ("ranking_log", "label_events")
}
ID_COLUMNS = {
    "user": ("user_id", "user_text"),
    "item": ("item_id", "item_text"),
    "category": ("category_id", "category_text"),
    "categories": ("categories", "categories_text"),
    "advertiser": ("advertiser_id", "advertiser_text"),
}


class Settings(Section):
    """The [ingest_log] section."""

    section = "ingest_log"
    clock_skew_minutes: float = Field(
        10.0, ge=0, description="An event later than its arrival by more is from the future"
    )
    max_ahead_hours: float = Field(
        24.0, ge=0, description="In a live log without arrival times, so is one this far past as_of"
    )
    late_days: float = Field(
        7.0,
        ge=0,
        description="How far back duplicates and late rows without arrival times are looked "
        "for; 0: through the whole log",
    )


@dataclass(frozen=True)
class Context:
    """What every step of the run needs: the run, its mapping and moment, and the frames to forget at the end."""

    run: Run
    dataset: Dataset
    moment: rules.Moment
    log_path: str
    other_path: str
    frames: ExitStack

    def name(self, part: str) -> str:
        return f"dataset {self.run.config.log.dataset}, {part}"

    def keep(self, rows: DataFrame) -> DataFrame:
        """Caches rows until the run ends."""
        rows = rows.persist()
        self.frames.callback(rows.unpersist)
        return rows


@dataclass(frozen=True)
class Part:
    """The rows of one part of the dataset that concern this run, with their state, and how many there are of each."""

    name: str
    rows: DataFrame
    counts: dict[str, int]
    read: int
    waiting: int = 0

    @property
    def kept(self) -> DataFrame:
        return self.rows.where(F.col(rules.STATE) == rules.KEPT)

    @property
    def accepted(self) -> int:
        return self.counts.get(rules.KEPT, 0) + self.counts.get(rules.DUPLICATE, 0)


def run(run: Run, settings: Settings) -> Report:
    """Loads the parts, refuses what can't be used, and publishes, ranking_log last."""
    dataset = load_dataset(run.config.log.dataset)
    with ExitStack() as frames:
        context = Context(run, dataset, _moment(run, settings, dataset), *base_paths(run.config, dataset), frames)
        log, items, labels = side_by_side(
            lambda: load_log(context), lambda: load_items(context), lambda: load_labels(context)
        )
        present = [part for part in (log, items, labels) if part is not None]

        rejected, dated = _refuse(context, present)
        before = latest_per(run.tables.read("items").where(F.col("slice") < run.slice), "item_id")
        listed = None if items is None else items.kept
        fresh = context.keep(new_items(items_of(log.kept, listed), before))
        fresh_count = count_alike(fresh, before, context.name("items"))

        ids = _publish_ids(context, present)
        item_count, label_count = side_by_side(
            lambda: _publish(run, fresh, "items", fresh_count), lambda: _publish_labels(run, labels)
        )
        written = _publish(run, log.kept.select(*OWN["ranking_log"]), "ranking_log", log.counts.get(rules.KEPT, 0))
    metrics = {
        "waiting": log.waiting,
        "duplicates": log.counts.get(rules.DUPLICATE, 0),
        "items": item_count,
        "label_events": label_count,
        "new_ids": ids,
    }
    return Report(log.accepted + dated, written, rejected, {key: float(value) for key, value in metrics.items()})


def load_log(context: Context) -> Part:
    """The log's rows that concern this run. Raises UserError if the log holds no rows at all."""
    name = context.name("log")
    path = context.log_path
    source = read_source(context.run.spark, context.dataset.log, path, name)
    part = _load(
        context,
        "log",
        parts.log_rows(source, context.dataset, name),
        "ranking_log",
        LOG_KEY,
        [*(F.col(column) for column in LOG_TIES), F.to_json("labels")],
    )
    if part.read == 0:
        raise UserError(f"{name}: {path} holds no rows")
    return part


def load_labels(context: Context) -> Part | None:
    """The later labels that concern this run, their occurred_at as event_time; None if the dataset has none."""
    part, name = context.dataset.label_events, context.name("label_events")
    if part is None:
        return None
    source = read_source(context.run.spark, part, location(context.other_path, part.files), name)
    rows = parts.label_rows(source, part, context.dataset, name)
    return _load(context, "label_events", rows, "label_events", LABEL_KEY, [F.col("value")])


def load_items(context: Context) -> Part | None:
    """The items of the items files that exist at as_of, one row each; None if the dataset has no such files."""
    part, name = context.dataset.items, context.name("items")
    if not isinstance(part, ItemsPart):
        return None
    source = read_source(context.run.spark, part, location(context.other_path, part.files), name)
    born = F.col("created_at").isNull() | (F.col("created_at") < ts(context.run.as_of))
    state = F.when(F.col("fault").isNotNull(), rules.UNDATED).when(born, rules.NEW).otherwise(rules.WAITING)
    rows = with_raw(parts.item_rows(source, part, context.dataset, name)).withColumn(rules.STATE, state)
    rows = context.keep(rows)
    with reading(name):
        counts = _counts(rows)
    good = one_per_item(rows.where(F.col(rules.STATE) == rules.NEW), "created_at").withColumn(
        rules.STATE, F.lit(rules.KEPT)
    )
    bad = rows.where(F.col(rules.STATE) == rules.UNDATED)
    return Part("items", good.unionByName(bad), counts, sum(counts.values()))


def _load(context: Context, name: str, rows: DataFrame, table: str, key: Sequence[str], ties: Sequence[Column]) -> Part:
    """Classifies rows and settles which of them are kept, in one pass over the files."""
    observed = Observation()
    state = F.col(rules.STATE)
    rows = rules.classify(rows, context.moment).observe(
        observed, F.count(F.lit(1)).alias("read"), F.count_if(state == rules.WAITING).alias("waiting")
    )
    rows = rows.where(~state.isin(rules.WAITING, rules.HELD))
    tables = context.run.tables
    rows = with_raw(rows, everywhere=not context.moment.replay)
    if not context.moment.replay:
        rows = rules.never_refused(rows, _rejected_elsewhere(context.run))
    held = rules.other_slices(tables.read(table), context.moment) if tables.exists(table) else None
    rows = context.keep(rules.keep_first(rows, key, held, ties))
    with reading(context.name(name)):
        counts = _counts(rows)
    return Part(name, rows, counts, int(observed.get["read"]), int(observed.get["waiting"]))


def _refuse(context: Context, loaded: Sequence[Part]) -> tuple[int, int]:
    """Records the refused rows and fails the run if they are too many. Returns how many, and how many rows of the log
    had a time that places them in this run."""
    run, states = context.run, (rules.REFUSED, rules.UNDATED)
    dated: dict[str, int] = {}
    rejected = 0
    faulty = [part for part in loaded if any(part.counts.get(state) for state in states)]
    if faulty:
        rows = reduce(
            DataFrame.unionByName,
            [
                part.rows.where(F.col(rules.STATE).isin(*states)).select(
                    F.lit(part.name).alias("part"), rules.STATE, "fault", "raw"
                )
                for part in faulty
            ],
        )
        rows = context.keep(rules.not_refused_before(rows, _rejected_elsewhere(run)))
        found = {
            (row["part"], row[rules.STATE]): row["count"] for row in rows.groupBy("part", rules.STATE).count().collect()
        }
        rejected = sum(found.values())
        prefix = F.when(F.col("part") == "log", "").otherwise(F.concat("part", F.lit(": ")))
        if rejected or _has_slice(run, "rejected_rows"):
            run.reject(rows.select(F.concat(prefix, "fault").alias("reason"), F.col("raw").alias("row")))
        dated = {part: count for (part, state), count in found.items() if state == rules.REFUSED}
        for part in faulty:
            run.check_reject_rate(dated.get(part.name, 0), part.accepted + dated.get(part.name, 0))
            run.check_reject_rate(found.get((part.name, rules.UNDATED), 0), part.read)
    elif _has_slice(run, "rejected_rows"):
        run.reject(run.spark.createDataFrame([], "reason string, row string"))
    return rejected, dated.get("log", 0)


def _publish_ids(context: Context, loaded: Sequence[Part]) -> int:
    """Writes the string ids first seen in this run. Raises RunFailed, before anything else is published, if two strings
    have one id."""
    run = context.run
    kinds = [kind for kind, type_ in context.dataset.ids.model_dump().items() if type_ == "string"]
    if not kinds:
        return 0
    found = reduce(DataFrame.unionByName, [parts.id_texts(part.kept, ID_COLUMNS) for part in loaded])
    known = run.tables.read("id_map").where(F.col("slice") != run.slice).select("kind", "id", "original")
    ids = context.keep(settle_ids(found, known))
    clash = F.when(F.size("texts") > 1, F.struct("kind", "id", "texts"))
    total = ids.agg(F.count_if("new").alias("new"), F.min(clash).alias("clash")).first()
    assert total is not None
    if total.clash is not None:
        kind, id_, texts = total.clash
        raise RunFailed(
            f"{context.name('ids')}: the {kind} ids {texts[0]!r} and {texts[1]!r} have the same 64-bit hash {id_}; "
            "rename one of them; nothing was published"
        )
    new = ids.where("new").select("kind", "id", F.col("texts")[0].alias("original"))
    return _publish(run, new, "id_map", total.new)


def _publish_labels(run: Run, labels: Part | None) -> int:
    if labels is None:
        return 0
    events = labels.kept.withColumnRenamed("event_time", "occurred_at").select(*OWN["label_events"])
    return _publish(run, events, "label_events", labels.counts.get(rules.KEPT, 0))


def _publish(run: Run, rows: DataFrame, table: str, count: int) -> int:
    """Writes this run's slice; where there is nothing to write and nothing to replace, not even an empty commit."""
    if count == 0 and not _has_slice(run, table):
        return 0
    return run.write(rows, table)


def _has_slice(run: Run, table: str) -> bool:
    """Whether an earlier try of this run wrote rows to the table."""
    if not run.tables.exists(table):
        return False
    rows = run.tables.read_slice(table, run.as_of)
    return not (rows.where(F.col("source") == run.job) if table == "rejected_rows" else rows).isEmpty()


def _moment(run: Run, settings: Settings, dataset: Dataset) -> rules.Moment:
    previous = run.tables.last_slice("ranking_log", before=run.as_of)
    return rules.Moment(
        as_of=run.as_of,
        previous=None if previous is None else as_of_of(previous),
        replay=dataset.replay,
        skew=timedelta(minutes=settings.clock_skew_minutes),
        max_ahead=timedelta(hours=settings.max_ahead_hours),
        late=timedelta(days=settings.late_days) if settings.late_days else None,
    )


def _rejected_elsewhere(run: Run) -> DataFrame:
    return run.tables.read("rejected_rows").where((F.col("source") == run.job) & (F.col("slice") != run.slice))


def _counts(rows: DataFrame) -> dict[str, int]:
    return {row[rules.STATE]: row["count"] for row in rows.groupBy(rules.STATE).count().collect()}


if __name__ == "__main__":
    main("ingest_log")
