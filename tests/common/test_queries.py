"""`solaris sql` reads; a damaged table is named; ids of text are Spark's hash."""

import numpy as np
import pytest
from py4j.protocol import Py4JJavaError
from rich.console import Console

from jobs.common.console import show_query
from jobs.common.errors import UserError
from jobs.common.failures import outside_fault
from solaris_udf.snapshot import text_ids
from tests.conftest import AS_OF, hours


def test_queries_read_and_what_would_change_something_is_refused(spark, make_config, fill, tables, capsys):
    fill("items", [{"item_id": 1}, {"item_id": 2}])
    console = Console(width=120, markup=False)
    for query in (
        "SELECT count(*) AS n FROM items; ",
        "WITH a AS (SELECT * FROM items) SELECT * FROM a -- a comment",
        "VALUES (1), (2)",
        "FROM items |> WHERE item_id > 1",
        "describe items",
        "SELECT '[/odd] [red]' AS text",
    ):
        show_query(spark, make_config(), query, 5, console)
    assert "[/odd] [red]" in capsys.readouterr().out
    for query in (
        "DELETE FROM items",
        "WITH a AS (SELECT * FROM items) INSERT INTO items SELECT * FROM a",
        "DROP VIEW items",
        "CREATE TABLE x AS SELECT 1",
    ):
        with pytest.raises(UserError, match="tables stay as they are"):
            show_query(spark, make_config(), query, 5, console)
    assert {row.item_id for row in tables.read("items").collect()} == {1, 2}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "PARSE_"),
        ("SELEC 1", "PARSE_SYNTAX_ERROR"),
        ("SELECT nothing FROM items", "UNRESOLVED_COLUMN"),
        ("SELECT 1 / (id - id) FROM range(3)", "DIVIDE_BY_ZERO"),
        ("SELECT CAST('x' AS INT)", "CAST_INVALID_INPUT"),
    ],
)
def test_a_wrong_query_is_one_line(spark, make_config, query, says):
    with pytest.raises(UserError, match=f"^query: .*{says}") as error:
        show_query(spark, make_config(), query, 5, Console(markup=False))
    assert len(str(error.value).splitlines()) == 1


def test_a_damaged_table_is_named(spark, root, fill, tables):
    fill("items", [{"item_id": 1}], AS_OF)
    fill("items", [{"item_id": 2}], AS_OF + hours(6))
    log = sorted((root / "tables" / "items" / "_delta_log").glob("*.json"))[1]
    text = log.read_bytes()
    log.unlink()
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    with pytest.raises(UserError, match=r"^table items at .*DELTA_VERSIONS_NOT_CONTIGUOUS"):
        tables.read("items")

    log.write_bytes(text)
    for file in (root / "tables" / "items").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(Py4JJavaError) as error:
        tables.read("items").collect()
    assert str(root / "tables" / "items") in str(outside_fault(error.value))
    assert "damaged or gone" in str(outside_fault(error.value))


def test_ids_of_text_are_what_ingest_log_makes_of_them(spark):
    texts = ["", "a", "u-42", "12345678", "x" * 31, "é" * 16, "y" * 33, "long " * 40]
    rows = (
        spark.createDataFrame([(text,) for text in texts], "text STRING").selectExpr("xxhash64(text) AS id").collect()
    )
    assert text_ids(texts).tolist() == [row.id for row in rows]
    assert text_ids([]).dtype == np.int64
