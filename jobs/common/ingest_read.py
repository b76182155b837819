"""Reading the files of a dataset as they are: text columns as strings, malformed records kept, expressions checked."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from jobs.common.config import Config
from jobs.common.datasets import Dataset, Source
from jobs.common.errors import UserError

CORRUPT = "_corrupt_record"
SOURCE = "_source"
ELEMENT, ELEMENT_INDEX = "element", "element_index"


def is_location(text: str) -> bool:
    """Whether a path is complete in itself: absolute, or a URI with a scheme."""
    return text.startswith(("/", "file:")) or "://" in text


def base_paths(config: Config, dataset: Dataset) -> tuple[str, str]:
    """Where the log's files are, and the folder that the other parts' files are relative to.

    log.path replaces the mapping's own path; where it is one file, that file is the log and the rest lies beside it.
    """
    given = config.log.path
    base = given or (dataset.path if is_location(dataset.path) else config.path(dataset.path))
    local = Path(base.removeprefix("file://"))
    if given and "://" not in base.removeprefix("file://") and local.is_file():
        return base, str(local.parent)
    return location(base, dataset.log.files), base


def location(base: str, files: str) -> str:
    """Where a part's files are: base itself, or files below it."""
    return files if is_location(files) else f"{base.rstrip('/')}/{files}" if files else base


def read_source(spark: SparkSession, source: Source, path: str, name: str) -> DataFrame:
    """The rows of the files, with CORRUPT: the text of a record that does not fit the format, else null; SOURCE: all
    columns as they came, as a struct.

    csv, tsv and jsonl give strings (nested JSON keeps its structure), so that ids keep every digit. Columns below
    `types` are cast, null where a value does not fit. name says which part this is, for errors.

    Raises UserError if nothing is there, it is empty or not of its format, or types names an unknown column.
    """
    try:
        rows = _read(spark, source, path)
    except PySparkException as error:
        missing = (
            "PATH_NOT_FOUND" in str(error) or "PATH_DOES_NOT_EXIST" in str(error) or "not a Delta table" in str(error)
        )
        if missing or "DELTA_TABLE_NOT_FOUND" in str(error) or "doesn't exist" in str(error):
            raise UserError(
                f"{name}: there is nothing at {path}; put the files there, or set log.path (and files in the "
                "mapping) to where they are"
            ) from None
        raise UserError(f"{name}: {path} can't be read as {source.format}: {one_line(error)}") from None
    columns = [column for column in rows.columns if column != CORRUPT]
    if not columns:
        raise UserError(f"{name}: {path} is empty: it holds no rows and no columns")
    rows = rows.withColumn(SOURCE, F.struct(*[F.col(quoted(column)) for column in columns]))
    for column, kind in source.types.items():
        if column not in columns:
            raise UserError(
                f"{name}: types names {column!r}, but the files have no such column{nearest(column, columns)}"
            )
        try:
            rows = rows.withColumn(column, F.col(quoted(column)).try_cast(kind))
        except (AnalysisException, ParseException) as error:
            raise UserError(f"{name}: types.{column} = {kind!r} can't be used: {one_line(error)}") from None
    if source.explode:
        position, element = (
            F.posexplode_outer(checked(rows, source.explode, f"{name}.explode")),
            [ELEMENT_INDEX, ELEMENT],
        )
        try:
            rows = rows.select("*", position.alias(*element))
        except AnalysisException as error:
            raise UserError(f"{name}.explode = {source.explode!r} is not an array: {one_line(error)}") from None
    return rows


def evaluate(rows: DataFrame, expressions: Mapping[str, str], name: str) -> DataFrame:
    """One column per expression, under its key, and CORRUPT and SOURCE.

    Raises UserError that names the key of a wrong column or expression.
    """
    values = [checked(rows, text, f"{name}.{key}").alias(key) for key, text in expressions.items()]
    try:
        return rows.select(*values, CORRUPT, SOURCE)
    except AnalysisException as error:
        raise UserError(f"{name}: an expression can't be used row by row: {one_line(error)}") from None


def with_raw(rows: DataFrame, everywhere: bool = False) -> DataFrame:
    """`raw` instead of CORRUPT and SOURCE: the row as it came, JSON or the malformed record's own text; of rows without
    fault only if asked for, because it costs."""
    raw = F.coalesce(F.col(CORRUPT), F.to_json(SOURCE, {"ignoreNullFields": "false"}))
    raw = raw if everywhere else F.when(F.col("fault").isNotNull(), raw)
    return rows.withColumn("raw", raw).drop(CORRUPT, SOURCE)


def checked(rows: DataFrame, text: str, key: str) -> Column:
    """The column of that very name, or the expression. Raises UserError that says what is wrong and what is near."""
    columns = [column for column in rows.columns if column not in (CORRUPT, SOURCE)]
    if text in columns:
        return F.col(quoted(text))
    try:
        value = F.expr(text)
        rows.select(value)
    except ParseException as error:
        hint = nearest(text, columns) if not set(text) & set("()=<>+*/'") else ""
        raise UserError(f"{key} = {text!r} is neither a column nor valid Spark SQL: {one_line(error)}{hint}") from None
    except AnalysisException as error:
        if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
            unknown = (error.getMessageParameters() or {}).get("objectName", text).replace("`", "")
            raise UserError(
                f"{key} = {text!r}: the files have no column {unknown}{nearest(unknown, columns)}"
            ) from None
        raise UserError(f"{key} = {text!r} is not valid Spark SQL here: {one_line(error)}") from None
    return value


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns what Spark only notices while it reads (a value that an expression can't use, headers that differ from file
    to file) into a UserError."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "CSV header does not conform" in text:
            detail = text[text.index("CSV header") :].splitlines()
            raise UserError(
                f"{name}: the files' headers differ: {' '.join(line.strip() for line in detail[:5])}"
            ) from None
        for condition in (
            "CAST_INVALID_INPUT",
            "CAST_OVERFLOW",
            "DIVIDE_BY_ZERO",
            "ARITHMETIC_OVERFLOW",
            "NUMERIC_VALUE",
            "INVALID_ARRAY_INDEX",
            "INVALID_DATETIME_PATTERN",
            "CANNOT_PARSE_TIMESTAMP",
        ):
            if condition in text:
                line = next(line for line in text.splitlines() if condition in line)
                raise UserError(
                    f"{name}: an expression of the mapping meets a value that it can't use: "
                    f"{line[line.index('[') :] if '[' in line else line}; declare the column's type below types "
                    "(a row that does not fit is then rejected), or use try_cast, try_divide, ..."
                ) from None
        raise


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean x?`, or the list of what there is."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    shown = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
    return (f"; did you mean {close[0]}?" if close else "") + f" (columns: {shown})"


def one_line(error: Exception) -> str:
    """The first line of an error that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]


def quoted(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"


def _read(spark: SparkSession, source: Source, path: str) -> DataFrame:
    if source.format in ("parquet", "delta"):
        rows = spark.read.format(source.format).load(path)
        return rows.withColumn(CORRUPT, F.lit(None).cast("string"))
    reader = spark.read.option("mode", "PERMISSIVE").option("columnNameOfCorruptRecord", CORRUPT)
    reader = reader.option("multiLine", source.multiline).option("encoding", source.encoding)
    if source.format == "jsonl":
        reader = reader.option("primitivesAsString", True)
        return reader.schema(_with_corrupt(reader.json(path).schema)).json(path)
    reader = (
        reader.option("sep", source.delimiter or ("\t" if source.format == "tsv" else ","))
        .option("quote", source.quote)
        .option("escape", source.escape or source.quote or "\\")
        # Each file's header is checked against the first one's: a column must not be taken for another.
        .option("header", source.header)
        .option("enforceSchema", not source.header)
    )
    names = list(source.names) if not source.header else _header(reader, path)
    schema = StructType([StructField(column, StringType()) for column in names])
    return reader.schema(_with_corrupt(schema)).csv(path) if names else spark.createDataFrame([], _with_corrupt(schema))


def _header(reader: DataFrameReader, path: str) -> list[str]:
    return [column for column in reader.option("inferSchema", False).csv(path).columns if column != CORRUPT]


def _with_corrupt(schema: StructType) -> StructType:
    return StructType(
        [*(field for field in schema.fields if field.name != CORRUPT), StructField(CORRUPT, StringType())]
    )


def dtype(rows: DataFrame, column: str) -> DataType:
    return rows.schema[column].dataType
