"""`solaris neighbors`: a user's neighbours in the terminal, and what they have in common."""

from datetime import UTC

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jobs.common.clock import as_of_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.log import latest_build, log_before
from jobs.common.tables import Tables

SHOWN_ITEMS = 5


def show_neighbors(spark: SparkSession, config: Config, user: int, console: Console) -> None:
    """The user's neighbours of the latest build: cosine, how many items both were scored with, and the first of those.

    Raises UserError if nothing was searched yet or the user is not in it.
    """
    if not -(2**63) <= user < 2**63:
        raise UserError(f"{user} is no 64-bit integer, as ids are")
    tables = Tables(spark, config.path("tables"))
    build = latest_build(tables.read("user_neighbors"))
    row = build.where(F.col("user_id") == user).first()
    days = config.sections["find_neighbors"].model_dump()["days"]
    if row is None:
        newest = tables.last_slice("user_neighbors")
        if newest is None:
            raise UserError("no neighbours have been searched yet; solaris run does, or the job find_neighbors")
        raise UserError(
            f"user {user} has no row in user_neighbors up to {newest}: not seen in the log in {days:g} days, or "
            "without a user embedding"
        )
    members = build.where(F.col("cluster_id") == row.cluster_id).count()
    console.print(
        f"user {user}, cluster {row.cluster_id} of {members:,} users, embedding of "
        f"{row.embedding_at.replace(tzinfo=UTC):%Y-%m-%d %H:%M} UTC, build {row.build}",
        highlight=False,
    )
    if not row.neighbors:
        console.print("no neighbours: the embedding is a zero vector, or there is no other user")
        return
    shared = _shared_items(tables, row, days)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("neighbour", "cosine", "items", "in common"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("the items most scored for both")
    for hit in row.neighbors:
        items, common, first = shared.get(hit.user_id, (0, 0, []))
        names = ", ".join(map(str, first)) + (", ..." if common > len(first) else "")
        table.add_row(str(hit.user_id), f"{hit.similarity:.3f}", f"{items:,}", f"{common:,}", names)
    console.print(table)


def _shared_items(tables: Tables, row: Row, days: float) -> dict[int, tuple[int, int, list[int]]]:
    """By neighbour: their items in the log of the last days, how many of them the user has too, and the first of those
    by the rows of both. One row a neighbour comes to the driver."""
    neighbors = [hit.user_id for hit in row.neighbors]
    log = log_before(tables, as_of_of(row.slice), days * 24).where(F.col("user_id").isin([row.user_id, *neighbors]))
    counts = log.groupBy("user_id", "item_id").agg(F.count("*").alias("rows"))
    own = counts.where(F.col("user_id") == row.user_id).select("item_id", F.col("rows").alias("own_rows"))
    pairs = counts.where(F.col("user_id") != row.user_id).join(own, "item_id", "left")
    fewest = F.struct((-F.least("rows", "own_rows")).alias("fewest"), "item_id")
    ranked = F.sort_array(F.collect_list(F.when(F.col("own_rows").isNotNull(), fewest)))
    rows = pairs.groupBy("user_id").agg(
        F.count("*").alias("items"),
        F.count("own_rows").alias("common"),
        F.slice(ranked, 1, SHOWN_ITEMS)["item_id"].alias("first"),
    )
    return {each.user_id: (each["items"], each.common, each.first) for each in rows.collect()}
