"""Delta tables: created with their constraints and comments, checked against their schema, written slice by slice."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import cast

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from schemas import TABLES, Column, Table


class Tables:
    """The tables below one root folder or URI.

    A table is created on first write. Reading one that does not exist yet gives no rows, so that first slices need no
    special case.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.spark = spark
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.root}/{_table(name).name}"

    def exists(self, name: str) -> bool:
        with self._opening(name):
            return DeltaTable.isDeltaTable(self.spark, self.path(name))

    @contextmanager
    def _opening(self, name: str) -> Iterator[None]:
        """Turns a Delta log that can't be read into a UserError."""
        try:
            yield
        except (PySparkException, Py4JJavaError) as error:
            found = re.search(r"\[DELTA_\w+\].*", str(error))
            if found is None:
                raise
            raise UserError(
                f"table {name} at {self.path(name)} can't be opened: {found[0].strip()[:300]}; restore its _delta_log "
                "from a copy, or remove the table's folder and run its slices again (solaris run --force)"
            ) from None

    def create(self, name: str) -> None:
        """Creates the table with its columns, comments, NOT NULL and CHECK constraints.

        To one that exists, made by an older release, the columns that came since are added.
        """
        table = _table(name)
        if self.exists(name):
            for column in self._missing_columns(table, self._load(name)):
                self.spark.sql(f"ALTER TABLE delta.`{self.path(name)}` ADD COLUMNS ({column.ddl})")
            return
        builder = DeltaTable.createIfNotExists(self.spark).location(self.path(name)).comment(table.comment)
        for column in table.columns:
            builder = builder.addColumn(column.name, column.type, nullable=column.nullable, comment=column.comment)
        for check, expression in table.checks.items():
            builder = builder.property(f"delta.constraints.{check}", expression)
        if table.partition_by:
            builder = builder.partitionedBy(*table.partition_by)
        try:
            builder.execute()
        except Exception:
            if not self.exists(name):  # else another job created it meanwhile
                raise

    def read(self, name: str) -> DataFrame:
        """All rows of the table; none if it does not exist yet."""
        if not self.exists(name):
            return self.spark.createDataFrame([], spark_schema(_table(name)))
        frame = self._load(name)
        missing = self._missing_columns(_table(name), frame)
        if not missing:
            return frame
        return frame.withColumns({column.name: F.lit(None).cast(column.type) for column in missing})

    def _load(self, name: str) -> DataFrame:
        with self._opening(name):
            return self.spark.read.format("delta").load(self.path(name))

    def _missing_columns(self, table: Table, frame: DataFrame) -> list[Column]:
        missing = [column for column in table.columns if column.name not in frame.columns]
        required = [column.name for column in missing if not column.nullable]
        if required:
            raise UserError(
                f"table {table.name} at {self.path(table.name)} lacks {', '.join(required)}: another release made it; "
                "remove the table's folder and run its slices again (solaris run --force)"
            )
        return missing

    def read_slice(self, name: str, as_of: datetime) -> DataFrame:
        """The rows of exactly one slice."""
        return self.read(name).where(F.col("slice") == slice_of(as_of))

    def slices(self, name: str) -> list[str]:
        """The names of the table's slices that have rows, ascending. One string a run, so it stays small."""
        rows = self.read(name).select("slice").distinct().orderBy("slice").collect()
        return [row.slice for row in rows]

    def last_slice(self, name: str, before: datetime | None = None, until: datetime | None = None) -> str | None:
        """The latest slice before a time (excluded) or until a time (included); None if there is none."""
        rows = self.read(name)
        if before is not None:
            rows = rows.where(F.col("slice") < slice_of(before))
        if until is not None:
            rows = rows.where(F.col("slice") <= slice_of(until))
        found: str | None = rows.agg(F.max("slice").alias("slice")).first()["slice"]  # type: ignore[index]
        return found

    def replace(self, frame: DataFrame, name: str, **partition: str) -> int:
        """Replaces one partition of the table by the rows of frame, in one atomic commit. Returns the rows written.

        A retry of the same run replaces and never appends; other partitions are not touched, so runs of different
        slices never conflict.
        """
        table = _table(name)
        check_schema(frame, table)
        if tuple(partition) != table.partition_by:
            raise ValueError(f"table {name} is partitioned by {table.partition_by}, not {tuple(partition)}")
        self.create(name)
        where = " AND ".join(f"{column} = '{value}'" for column, value in partition.items())
        (
            frame.select(*table.column_names)
            .write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", where)
            .save(self.path(name))
        )
        return self.read(name).where(where).count()

    def set_properties(self, name: str, values: Mapping[str, object]) -> None:
        """Sets properties `solaris.KEY` of an existing table, for whoever opens it without our run records."""
        pairs = ", ".join(f"'solaris.{key}' = '{value}'" for key, value in values.items())
        self.spark.sql(f"ALTER TABLE delta.`{self.path(name)}` SET TBLPROPERTIES ({pairs})")

    def append(self, frame: DataFrame, name: str) -> None:
        """Appends rows; only for tables without slices (job_runs)."""
        table = _table(name)
        check_schema(frame, table)
        self.create(name)
        frame.select(*table.column_names).write.format("delta").mode("append").save(self.path(name))

    def register_views(self) -> None:
        """Makes every table a temporary view of its name, for SQL users."""
        for name in TABLES:
            self.read(name).createOrReplaceTempView(name)


def spark_schema(table: Table) -> StructType:
    """The table's columns as a Spark schema."""
    return cast(StructType, StructType.fromDDL(table.ddl))


def check_schema(frame: DataFrame, table: Table) -> None:
    """Raises UserError that lists every difference between the frame's columns and the table's, nested ones by path.

    Nullability is left to the table's own NOT NULL constraints: Spark often can't know it.
    """
    expected = {field.name: field.dataType for field in spark_schema(table).fields}
    actual = {field.name: field.dataType for field in frame.schema.fields}
    faults = [f"missing column {name} {kind.simpleString()}" for name, kind in expected.items() if name not in actual]
    faults += [
        f"unexpected column {name} {kind.simpleString()}" for name, kind in actual.items() if name not in expected
    ]
    for name in expected.keys() & actual.keys():
        faults += _type_differences(name, expected[name], actual[name])
    if faults:
        raise UserError(f"table {table.name}: " + "; ".join(sorted(faults)))


def _type_differences(path: str, expected: DataType, actual: DataType) -> list[str]:
    if isinstance(expected, StructType) and isinstance(actual, StructType):
        wanted = {field.name: field.dataType for field in expected.fields}
        found = {field.name: field.dataType for field in actual.fields}
        faults = [f"missing field {path}.{name}" for name in wanted.keys() - found.keys()]
        faults += [f"unexpected field {path}.{name}" for name in found.keys() - wanted.keys()]
        for name in wanted.keys() & found.keys():
            faults += _type_differences(f"{path}.{name}", wanted[name], found[name])
        return faults
    if isinstance(expected, ArrayType) and isinstance(actual, ArrayType):
        return _type_differences(f"{path}[]", expected.elementType, actual.elementType)
    if isinstance(expected, MapType) and isinstance(actual, MapType):
        return _type_differences(f"{path}.key", expected.keyType, actual.keyType) + _type_differences(
            f"{path}.value", expected.valueType, actual.valueType
        )
    if expected.typeName() != actual.typeName():
        return [f"{path} is {actual.simpleString()}, must be {expected.simpleString()} (cast it)"]
    return []


def _table(name: str) -> Table:
    if name not in TABLES:
        raise UserError(f"there is no table {name!r}; tables: {', '.join(TABLES)}")
    return TABLES[name]
