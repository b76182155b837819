"""Which item rows and which id_map rows a run writes: what is new, and what differs from what is known."""

from functools import reduce

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from jobs.common.errors import UserError
from jobs.common.ingest_parts import ITEM_VALUES
from schemas import TABLES

KINDS = {column.name: column.type for column in TABLES["items"].columns}
COLUMNS = ("item_id", *ITEM_VALUES)


def new_items(found: DataFrame, known: DataFrame) -> DataFrame:
    """The items of found (one row an item, `derived` if only the log names it) that are new or differ from the known.

    An item that the log alone names is new once, and changes nothing that is known.
    """
    values = list(ITEM_VALUES)
    before = known.select("item_id", F.lit(True).alias("_known"), *[F.col(name).alias(f"_{name}") for name in values])
    same = reduce(lambda left, right: left & right, [F.col(name).eqNullSafe(F.col(f"_{name}")) for name in values])
    changed = F.col("_known").isNull() | (~F.col("derived") & ~same)
    return found.join(before, on="item_id", how="left").where(changed).select(*COLUMNS)


def one_per_item(rows: DataFrame, *order: str) -> DataFrame:
    """One row per item: the last by the given columns, then by all others."""
    columns = [F.col(name).desc_nulls_last() for name in (*order, *ITEM_VALUES)]
    place = F.row_number().over(Window.partitionBy("item_id").orderBy(*columns))
    return rows.withColumn("_place", place).where(F.col("_place") == 1).drop("_place")


def items_of(kept: DataFrame, listed: DataFrame | None) -> DataFrame:
    """Every item that the run knows: those of the items files (listed), or else of the log's own columns, and the ids
    of log rows that no file lists. Columns of items, `derived`."""
    if listed is None:
        has_values = "category_id" in kept.columns
        rows = kept if has_values else kept.withColumns({name: _null(name) for name in ITEM_VALUES})
        rows = one_per_item(rows, "event_time", "request_id") if has_values else rows.dropDuplicates(["item_id"])
        return rows.select(*COLUMNS).withColumn("derived", F.lit(not has_values))
    named = kept.select("item_id").distinct().join(listed.select("item_id"), on="item_id", how="left_anti")
    named = named.withColumns({name: _null(name) for name in ITEM_VALUES}).select(*COLUMNS)
    return (
        listed.select(*COLUMNS)
        .withColumn("derived", F.lit(False))
        .unionByName(named.withColumn("derived", F.lit(True)))
    )


def count_alike(fresh: DataFrame, before: DataFrame, name: str) -> int:
    """How many items there are. Raises UserError unless the features of every item have one length."""

    def lengths(rows: DataFrame) -> Row:
        found = rows.agg(
            F.count(F.lit(1)).alias("rows"),
            F.min(F.size("features")).alias("low"),
            F.max(F.size("features")).alias("high"),
        ).first()
        assert found is not None
        return found

    new = lengths(fresh)
    sizes = {new.low, new.high} - {None, -1}
    if sizes:
        known = lengths(before.where("features IS NOT NULL"))
        sizes |= {known.low, known.high} - {None, -1}
    if len(sizes) > 1:
        raise UserError(f"{name}: features must have one length for every item; there are lengths {sorted(sizes)}")
    return int(new.rows)


def settle_ids(found: DataFrame, known: DataFrame) -> DataFrame:
    """kind, id, texts of found: every string that the id stands for, and `new` if none of them is known.

    found: kind, id, original; known: the same of other slices. More than one text is a collision.
    """
    known = known.select("kind", "id", F.col("original").alias("_known"))
    grouped = found.groupBy("kind", "id").agg(F.collect_set("original").alias("texts"))
    texts = F.when(F.col("_known").isNull(), F.col("texts")).otherwise(F.array_union("texts", F.array("_known")))
    return grouped.join(known, on=["kind", "id"], how="left").select(
        "kind", "id", F.sort_array(texts).alias("texts"), F.col("_known").isNull().alias("new")
    )


def _null(column: str) -> Column:
    return F.lit(None).cast(KINDS[column])
