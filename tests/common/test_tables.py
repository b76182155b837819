from datetime import UTC, datetime

import pytest
from pyspark.sql import functions as F

from jobs.common.clock import as_of_of, parse_as_of, slice_of
from jobs.common.errors import UserError
from jobs.common.log import histories_at, items_at, log_before
from jobs.common.tables import check_schema, spark_schema
from schemas import TABLES
from tests.conftest import AS_OF, hours, log_row


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_created_with_its_columns_comments_and_constraints(spark, tables, name):
    tables.create(name)
    table = TABLES[name]
    described = {row.col_name: row for row in spark.sql(f"DESCRIBE TABLE delta.`{tables.path(name)}`").collect()}
    assert [column.comment for column in table.columns] == [described[column.name].comment for column in table.columns]
    properties = {row.key: row.value for row in spark.sql(f"SHOW TBLPROPERTIES delta.`{tables.path(name)}`").collect()}
    for check, expression in table.checks.items():
        assert properties[f"delta.constraints.{check.lower()}"] == expression
    assert tables.read(name).count() == 0


def test_a_slice_is_replaced_and_others_are_left(tables, fill):
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(1)), log_row(1, 11, AS_OF - hours(1))], AS_OF)
    fill("ranking_log", [log_row(2, 20, AS_OF)], AS_OF + hours(6))
    fill("ranking_log", [log_row(1, 12, AS_OF - hours(1))], AS_OF)
    assert sorted(row.item_id for row in tables.read("ranking_log").collect()) == [12, 20]
    assert tables.slices("ranking_log") == [slice_of(AS_OF), slice_of(AS_OF + hours(6))]
    assert tables.last_slice("ranking_log", before=AS_OF + hours(6)) == slice_of(AS_OF)
    assert tables.last_slice("ranking_log", before=AS_OF) is None


def test_a_row_that_breaks_a_constraint_is_refused_and_nothing_is_written(tables, fill):
    with pytest.raises(Exception, match="event_before_slice"):
        fill("ranking_log", [log_row(1, 10, AS_OF)], AS_OF)
    assert tables.read("ranking_log").count() == 0


def test_a_table_of_an_older_release_gets_the_columns_that_came_since(spark, tables, fill):
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(1))], AS_OF)
    path = tables.path("ranking_log")
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE delta.`{path}` DROP COLUMNS (labels, served_embedding)")
    (old,) = tables.read("ranking_log").collect()
    assert (old.item_id, old.labels, old.served_embedding) == (10, None, None)
    fill("ranking_log", [log_row(1, 11, AS_OF)], AS_OF + hours(6))
    assert set(spark.read.format("delta").load(path).columns) == set(TABLES["ranking_log"].column_names)
    assert sorted(row.item_id for row in tables.read("ranking_log").collect()) == [10, 11]


def test_a_table_without_a_column_that_must_not_be_empty_is_an_error(spark, tables):
    table = TABLES["user_histories"]
    rows = spark.createDataFrame([], spark_schema(table)).drop("requests")
    rows.write.format("delta").save(tables.path("user_histories"))
    for use in (tables.read, tables.create):
        with pytest.raises(UserError, match=r"user_histories at .* lacks requests: another release made it; remove"):
            use("user_histories")


def test_schema_check_lists_every_difference_at_once(spark):
    frame = (
        spark.createDataFrame([], spark_schema(TABLES["user_histories"]))
        .drop("requests")
        .withColumn("extra", F.lit(1))
        .withColumn("scored_rows", F.lit("x"))
        .withColumn("clicked", F.array(F.struct(F.lit(1).alias("item_id"))))
    )
    with pytest.raises(UserError) as error:
        check_schema(frame, TABLES["user_histories"])
    message = str(error.value)
    for part in (
        "missing column requests bigint",
        "unexpected column extra int",
        "scored_rows is string, must be bigint",
        "clicked[].item_id is int, must be bigint",
        "missing field clicked[].event_time",
    ):
        assert part in message


def test_log_before_knows_neither_the_future_nor_what_arrives_later(tables, fill):
    fill(
        "ranking_log",
        [
            log_row(1, 1, AS_OF - hours(25)),
            log_row(1, 2, AS_OF - hours(24)),
            log_row(1, 3, AS_OF - hours(1)),
        ],
        AS_OF,
    )
    fill(
        "ranking_log",
        [
            log_row(1, 4, AS_OF - hours(2), arrived_at=AS_OF + hours(1)),
            log_row(1, 5, AS_OF),
        ],
        AS_OF + hours(6),
    )

    def items(*when):
        return sorted(row.item_id for row in log_before(tables, *when).collect())

    assert items(AS_OF) == [1, 2, 3]
    assert items(AS_OF, 24) == [2, 3]
    assert items(AS_OF + hours(6)) == [1, 2, 3, 4, 5]
    assert items(AS_OF + hours(6), 8) == [3, 4, 5]


def test_items_at_takes_the_latest_row_known_then(tables, fill):
    fill("items", [{"item_id": 1, "category_id": 5}, {"item_id": 2}], AS_OF)
    fill("items", [{"item_id": 1, "category_id": 6}], AS_OF + hours(6))
    assert {row.item_id: row.category_id for row in items_at(tables, AS_OF).collect()} == {1: 5, 2: None}
    assert {row.item_id: row.category_id for row in items_at(tables, AS_OF + hours(6)).collect()} == {1: 6, 2: None}


def test_histories_at_reads_from_the_last_checkpoint(tables, fill):
    base = {"shown": [], "clicked": [], "requests": 1, "scored_rows": 1, "shown_rows": 0, "clicked_rows": 0}

    def history(user, at, checkpoint):
        return {**base, "user_id": user, "last_event_time": at - hours(1), "checkpoint": checkpoint}

    fill("user_histories", [history(1, AS_OF, True), history(2, AS_OF, True)], AS_OF)
    later = AS_OF + hours(6)
    fill("user_histories", [history(2, later, False)], later)
    assert {row.user_id: row.slice for row in histories_at(tables, later).collect()} == {
        1: slice_of(AS_OF),
        2: slice_of(later),
    }
    assert {row.user_id for row in histories_at(tables, AS_OF - hours(1)).collect()} == set()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-01-03T06:00:00",
        "yesterday",
        "2026-01-03T06:00:00.5Z",
        "0001-01-01T00:00:00+05:00",
        "9999-12-31T23:59:59-14:00",
    ],
)
def test_as_of_that_is_no_time_with_a_zone_on_our_calendar_is_an_error(text):
    with pytest.raises(UserError, match=r"^--from .* like 2026-01-03T06:00:00Z"):
        parse_as_of(text, "--from")


def test_slice_names_are_utc_and_come_back():
    at = parse_as_of("2026-01-03T11:30:00+05:30")
    assert (slice_of(at), as_of_of(slice_of(at))) == ("20260103T060000Z", datetime(2026, 1, 3, 6, tzinfo=UTC))
