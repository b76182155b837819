"""From what stands in a file to our types: each function gives the value and, where it can't be read, why.

A value that can't be read is null with a fault; a fault rejects its row. `name` is how the fault names the field.
"""

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from jobs.common.datasets import ZONE_LETTERS, Time
from jobs.common.errors import UserError

# Below these, floating-point numbers still hold every integer.
EXACT = {DoubleType: 2**53, FloatType: 2**24}
LAST_MICROS = 253_402_300_800_000_000  # year 10000: past what the tools that read the tables can show
MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1}
ZONED = r"(?i):[0-9.]+\s*(z|utc|gmt|[+-]\d{1,2}(:?\d{2})?(:\d{2})?|[a-z]+/[a-z_/]+)$"


@dataclass(frozen=True)
class Value:
    """A column of our type, and a STRING column that says what is wrong with it (null: nothing)."""

    value: Column
    fault: Column

    def optional(self, source: Column) -> "Value":
        """The same, but nothing is wrong if there is nothing."""
        return Value(
            self.value, F.when(source.isNull() | (F.trim(source.cast("string")) == ""), None).otherwise(self.fault)
        )


def integer_id(source: Column, kind: DataType, name: str) -> Value:
    """BIGINT, exact. Text is parsed as BIGINT and never as a double; a floating-point number must be a whole one that
    doubles hold exactly. Raises UserError for a type that holds no integers."""
    if isinstance(kind, IntegralType):
        value = source.cast("bigint")
    elif isinstance(kind, StringType):
        value = F.trim(source).try_cast("bigint")
    elif isinstance(kind, DoubleType | FloatType):
        value = F.when((source == F.floor(source)) & (F.abs(source) <= EXACT[type(kind)]), source.try_cast("bigint"))
    elif isinstance(kind, DecimalType):
        value = F.when(source.try_cast("decimal(38,0)") == source, source.try_cast("bigint"))
    else:
        raise UserError(
            f'{name} is {kind.simpleString()}, which is no integer id; say ids = "string" for its kind, or cast it'
        )
    return Value(value, _fault(source, kind, value, name, "is not a 64-bit integer"))


def string_id(source: Column, kind: DataType, name: str) -> Value:
    """BIGINT: xxhash64 of the text as it stands."""
    value = F.xxhash64(source.cast("string"))
    return Value(F.when(_present(source, kind), value), F.when(~_present(source, kind), F.lit(f"{name} is missing")))


def time(source: Column, kind: DataType, how: Time, name: str) -> Value:
    """TIMESTAMP in UTC, between 1970 and 9999. Local stamps need how.zone.

    Raises UserError for a timestamp column under an epoch unit, and for a column of local time without a zone.
    """
    if isinstance(kind, TimestampType | TimestampNTZType | DateType):
        if how.unit != "iso":
            raise UserError(f"{name} is a {kind.simpleString()} column, so time.unit must be 'iso', not {how.unit!r}")
        if isinstance(kind, TimestampType):
            value, complaint = source, "can't be read"
        else:
            if not how.zone:
                raise UserError(
                    f"{name} is a column of local time ({kind.simpleString()}); set time.zone to the zone it is in"
                )
            value, complaint = F.to_utc_timestamp(source.cast("timestamp"), how.zone), "can't be read"
    elif how.unit != "iso":
        number = (
            source.try_cast("decimal(26,6)")
            if not isinstance(kind, StringType)
            else F.trim(source).try_cast("decimal(26,6)")
        )
        value = F.timestamp_micros(F.floor(number * MICROS[how.unit]).try_cast("bigint"))
        complaint = f"is not a number of {how.unit} since 1970"
    elif how.format:
        value = F.try_to_timestamp(F.trim(source.cast("string")), F.lit(how.format))
        if not ZONE_LETTERS & set("".join(how.format.split("'")[::2])):
            value = F.to_utc_timestamp(value, how.zone)
        complaint = f"does not fit the format {how.format}"
    else:
        # Spark reads no stamp that ends in a zone right after the minutes.
        text = F.regexp_replace(
            F.trim(source.cast("string")), r"(?i)([T ]\d{1,2}:\d{2})(\s*(?:z|[+-]\d{1,2}(?::?\d{2})?))?$", "$1:00$2"
        )
        # Written without the colon, an offset is ISO 8601 too.
        text = F.regexp_replace(text, r"(:[0-9.]+\s*[+-]\d{2})(\d{2})$", "$1:$2")
        parsed = text.try_cast("timestamp")
        zoned = text.rlike(ZONED)
        local = F.to_utc_timestamp(parsed, how.zone) if how.zone else F.lit(None).cast("timestamp")
        value = F.when(zoned, parsed).otherwise(local)
        fault = F.when(parsed.isNull(), F.lit(f"{name} is not an ISO 8601 time"))
        fault = fault.when(value.isNull(), F.lit(f"{name} has no zone; set time.zone"))
        return _in_range(
            Value(value, F.when(~_present(source, kind), F.lit(f"{name} is missing")).otherwise(fault)), name
        )
    return _in_range(Value(value, _fault(source, kind, value, name, complaint)), name)


def flag(source: Column, kind: DataType, name: str) -> Value:
    """BOOLEAN from a boolean, from 0 or 1, or from true/false, t/f, yes/no, y/n as text."""
    if isinstance(kind, BooleanType):
        value = source
    elif isinstance(kind, NumericType):
        value = F.when(source == 1, True).when(source == 0, False)
    else:
        value = F.trim(source.cast("string")).try_cast("boolean")
    return Value(value, _fault(source, kind, value, name, "is neither true nor false"))


def number(source: Column, kind: DataType, name: str, into: str = "double") -> Value:
    """DOUBLE (or another numeric type), finite, of a number, a boolean or text."""
    value = (F.trim(source) if isinstance(kind, StringType) else source).try_cast(into)
    if into in ("double", "float"):
        value = F.when(~F.isnan(value) & (F.abs(value) != float("inf")), value)
    return Value(value, _fault(source, kind, value, name, f"is not a number ({into})"))


def numbers(source: Column, kind: DataType, name: str) -> Value:
    """ARRAY<FLOAT>, every element finite. Raises UserError if the source is no array."""
    if not isinstance(kind, ArrayType):
        raise UserError(f"{name} is {kind.simpleString()}, must be an array of numbers; use split(...) or array(...)")
    value = F.transform(source, lambda element: element.cast("string").try_cast("float"))
    fine = ~F.exists(value, lambda element: element.isNull() | F.isnan(element) | (F.abs(element) == float("inf")))
    value = F.when(fine, value)
    return Value(value, F.when(value.isNull(), F.lit(f"{name} holds something that is not a finite number")))


def vector(source: Column, kind: DataType, name: str) -> Value:
    """BINARY of float16 numbers. Raises UserError for another type."""
    if not isinstance(kind, BinaryType):
        raise UserError(f"{name} is {kind.simpleString()}, must be binary; use unbase64(...) or unhex(...) on text")
    return Value(source, F.when(F.length(source) % 2 != 0, F.lit(f"{name} has an odd number of bytes")))


def text(source: Column, kind: DataType, name: str) -> Value:
    """STRING, not empty."""
    present = _present(source, kind)
    return Value(F.when(present, source.cast("string")), F.when(~present, F.lit(f"{name} is missing")))


def all_faults(*faults: Column) -> Column:
    """Every fault of a row in one STRING, null if there is none."""
    joined = F.concat_ws("; ", *faults)
    return F.when(joined != "", joined)


def _present(source: Column, kind: DataType) -> Column:
    if isinstance(kind, StringType):
        return source.isNotNull() & (F.trim(source) != "")
    return source.isNotNull()


def _fault(source: Column, kind: DataType, value: Column, name: str, complaint: str) -> Column:
    missing = F.when(~_present(source, kind), F.lit(f"{name} is missing"))
    return missing.when(value.isNull(), F.lit(f"{name} {complaint}"))


def _in_range(value: Value, name: str) -> Value:
    micros = F.unix_micros(value.value)
    outside = (micros < 0) | (micros >= LAST_MICROS)
    fault = F.when(outside, F.lit(f"{name} is before 1970 or after 9999; is time.unit right?")).otherwise(value.fault)
    return Value(F.when(~outside, value.value), fault)
