"""Logical time. UTC only; a slice is named after the as_of of the run that owns it."""

from datetime import UTC, datetime, timedelta

from pyspark.sql import Column
from pyspark.sql import functions as F

from jobs.common.errors import UserError

SLICE_FORMAT = "%Y%m%dT%H%M%SZ"


# Windows and histories around an as_of must stay on the calendar, and a slice's name has four digits for the year.
YEARS = range(1970, 3000)
MAX_STEPS = 100_000


def parse_as_of(text: str, name: str = "as_of") -> datetime:
    """Reads an ISO 8601 time with a zone, whole seconds, and returns it in UTC. name: what it is, for errors.

    Raises UserError for anything else: a time without a zone means different things on different machines.
    """
    like = "like 2026-01-03T06:00:00Z"
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"{name} {text!r} is not a time; write it {like}") from None
    if value.tzinfo is None:
        raise UserError(f"{name} {text!r} has no time zone; write it {like}")
    if value.microsecond:
        raise UserError(f"{name} {text!r} has a fraction of a second; write whole seconds, {like}")
    if value.year not in YEARS:
        raise UserError(f"{name} {text!r} is not between {YEARS[0]} and {YEARS[-1]}; write it {like}")
    return value.astimezone(UTC)


def slice_of(as_of: datetime) -> str:
    """`20260103T060000Z`; sorts like the time itself."""
    return as_of.astimezone(UTC).strftime(SLICE_FORMAT)


def as_of_of(slice_name: str) -> datetime:
    """The inverse of slice_of."""
    return datetime.strptime(slice_name, SLICE_FORMAT).replace(tzinfo=UTC)


def micros(moment: datetime) -> int:
    """Microseconds since 1970-01-01 UTC, exact."""
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def from_micros(value: int) -> datetime:
    """The inverse of micros."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)


def ts(moment: datetime) -> Column:
    """A Spark timestamp literal that does not depend on any time zone setting."""
    return F.timestamp_micros(F.lit(micros(moment)))


def steps(start: datetime, end: datetime, hours: float) -> list[datetime]:
    """The as_of times start, start + hours, ... up to and including end."""
    if end < start:
        raise UserError(f"--to {end.isoformat()} is before --from {start.isoformat()}")
    count = int((end - start) / timedelta(hours=hours))
    if count >= MAX_STEPS:
        raise UserError(
            f"from {start.isoformat()} to {end.isoformat()} are {count + 1:,} slices of {hours:g} h, more than "
            f"{MAX_STEPS:,}; is --to right?"
        )
    return [start + timedelta(hours=hours * step) for step in range(count + 1)]
