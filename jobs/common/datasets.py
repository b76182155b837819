"""Dataset mappings: how the files of a log become our tables, declared in one TOML file a dataset.

A mapping lives in conf/datasets/NAME.toml, or anywhere if `log.dataset` is the path of its file. Every value below
`columns` and `labels` is the exact name of a column of the file, or else a Spark SQL expression over its columns (names
with other characters than letters, digits and _ in backquotes). Columns of text files are strings; `types` declares
those that expressions calculate with. docs/bring-your-own-log.md walks through one.
"""

import difflib
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jobs.common.errors import UserError

IdType = Literal["integer", "string"]
# A pattern with one of these letters outside quotes reads the zone from the text itself.
ZONE_LETTERS = frozenset("XxZVzO")


class Part(BaseModel):
    """A piece of a mapping. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Ids(Part):
    """What ids are in the files. Integers stay what they are; strings are hashed to 64 bits, see table id_map."""

    user: IdType = "integer"
    item: IdType = "integer"
    category: IdType = "integer"
    advertiser: IdType = "integer"


class Time(Part):
    """How times stand in the files."""

    unit: Literal["s", "ms", "us", "iso"] = Field(
        description="Epoch seconds, milliseconds, microseconds; or ISO 8601 text or a timestamp column"
    )
    zone: str = Field("", description="Zone of stamps that name none, like Asia/Kolkata; only with unit = 'iso'")
    format: str = Field("", description="Spark datetime pattern of text that is not ISO 8601; only with unit = 'iso'")

    @model_validator(mode="after")
    def _consistent(self) -> "Time":
        if self.unit != "iso" and (self.zone or self.format):
            raise ValueError(
                f"unit = {self.unit!r} counts from 1970-01-01 UTC, so zone and format mean nothing: remove them"
            )
        if self.zone and self.zone != "UTC" and self.zone not in available_timezones():
            close = difflib.get_close_matches(self.zone, available_timezones(), n=1, cutoff=0.5)
            raise ValueError(f"unknown zone {self.zone!r}" + (f"; did you mean {close[0]}?" if close else ""))
        unquoted = "".join(self.format.split("'")[::2])
        if self.format and not self.zone and not ZONE_LETTERS & set(unquoted):
            raise ValueError(f"format {self.format!r} reads no zone, so zone must say which one the stamps are in")
        return self


class Source(Part):
    """Where a part's files are and how they are read."""

    files: str = Field("", description="File, folder or glob below path; empty: path itself")
    format: Literal["csv", "tsv", "jsonl", "parquet", "delta"]
    delimiter: str = Field("", description="Empty: a comma for csv, a tab for tsv")
    quote: str = Field('"', max_length=1, description="Empty: quotes are ordinary characters")
    escape: str = Field("", max_length=1, description="Escapes a quote within quotes; empty: the quote doubled")
    header: bool = Field(True, description="Whether the first line of each csv or tsv file names the columns")
    names: tuple[str, ...] = Field((), description="The columns of a csv or tsv file without header")
    multiline: bool = Field(False, description="Whether quoted values may hold line breaks (such files are not split)")
    encoding: str = "UTF-8"
    explode: str = Field(
        "",
        description="Expression that gives an array: one row per element; columns element (its value) "
        "and element_index (from 0) are added",
    )
    types: dict[str, str] = Field(
        default_factory=dict,
        description="Spark types of columns that expressions calculate with; a value that does not fit counts as null",
    )
    time: Time | None = Field(None, description="Only if it differs from the dataset's [time]")

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            "".encode(value)
        except LookupError:
            raise ValueError("unknown encoding") from None
        return value

    @model_validator(mode="after")
    def _names_or_header(self) -> "Source":
        text = self.format in ("csv", "tsv")
        if text and not self.header and not self.names:
            raise ValueError("header = false needs names = [...], the columns in their order")
        if self.names and (self.header or not text):
            raise ValueError("names is only for csv and tsv files with header = false")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names gives one twice: {list(self.names)}")
        return self


class LogColumns(Part):
    """What a ranking-log row is made of."""

    user_id: str
    item_id: str
    event_time: str
    clicked: str
    shown: str = "true"
    arrived_at: str = Field("", description="When the row reached the log; empty: unknown")
    request_id: str = Field("", description="Empty: a user's rows of one time are one request")
    surface: str = Field("", description="Empty: 'unknown'")
    user_group: str = Field("", description="What the user declares, as one text, for the tier cold; empty: unknown")
    position: str = Field("", description="Rank in the request from 0; empty: unknown")
    served_embedding: str = Field(
        "", description="The vector that the online model read, BINARY of float16, empty for none; empty: not logged"
    )


class LogPart(Source):
    columns: LogColumns
    labels: dict[str, str] = Field(default_factory=dict, description="Further labels by name, numbers or booleans")


class ItemColumns(Part):
    """What an item row is made of. Without files of its own, the columns are those of the log."""

    item_id: str = ""
    category: str = ""
    categories: str = Field("", description="An array, the main one first; category is its first element if not given")
    advertiser: str = ""
    created_at: str = ""
    bid: str = ""
    features: str | tuple[str, ...] = Field("", description="An array, or a list of numbers' expressions")


class ItemsPart(Source):
    columns: ItemColumns

    @model_validator(mode="after")
    def _item_id(self) -> "ItemsPart":
        if not self.columns.item_id:
            raise ValueError("columns.item_id is missing")
        return self


class ItemsFromLog(Part):
    columns: ItemColumns

    @model_validator(mode="after")
    def _no_item_id(self) -> "ItemsFromLog":
        if self.columns.item_id:
            raise ValueError("without format, items come from the log, whose item_id is used: remove columns.item_id")
        return self


class LabelColumns(Part):
    """What a later label is made of."""

    request_id: str
    item_id: str
    label: str
    occurred_at: str
    arrived_at: str = ""
    value: str = "1.0"


class LabelsPart(Source):
    columns: LabelColumns


class Dataset(Part):
    """A whole mapping."""

    description: str = ""
    replay: bool = Field(
        description="true: files of past events that runs step through, rows after as_of wait their turn; "
        "false: a log that grows, rows far ahead of as_of are errors"
    )
    path: str = Field(
        "", description="Folder or URI, below storage.root unless absolute; the setting log.path replaces it"
    )
    ids: Ids = Ids()
    time: Time
    log: LogPart
    items: ItemsPart | ItemsFromLog | None = None
    label_events: LabelsPart | None = None

    @field_validator("items", mode="before")
    @classmethod
    def _which_items(cls, value: Any) -> Any:
        """Chooses by `format`, so that a fault names one kind's keys only."""
        if not isinstance(value, dict):
            return value
        kind = ItemsPart if {"format", "files"} & value.keys() else ItemsFromLog
        return kind(**value)


def known_datasets() -> dict[str, Path | zipfile.Path]:
    """The mappings in conf/datasets by name: beside the packages, in the checkout or in the archive of --py-files."""
    package = files("jobs")
    root = package.parent if isinstance(package, zipfile.Path) else Path(str(package)).parent
    folder = root / "conf" / "datasets"  # type: ignore[operator]
    found = folder.iterdir() if folder.is_dir() else ()
    return {path.stem: path for path in sorted(found, key=str) if path.name.endswith(".toml")}


def load_dataset(name: str) -> Dataset:
    """The mapping of that name in conf/datasets, or in the file of that path.

    Raises UserError that lists every fault at once: the key, what is wrong, the nearest valid key.
    """
    path: Path | zipfile.Path | None = known_datasets().get(name)
    if path is None:
        path = Path(name)
        if not (name.endswith(".toml") and path.is_file()):
            close = difflib.get_close_matches(name, known_datasets(), n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"there is no dataset {name!r}{hint} (datasets: {', '.join(known_datasets())}; or the path of a "
                "mapping file that ends in .toml)"
            )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"mapping {path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"mapping {path} can't be read: {error.strerror}") from None
    try:
        return Dataset(**content)
    except ValidationError as error:
        raise UserError(f"mapping {path}: " + "; ".join(_fault(dict(fault)) for fault in error.errors())) from None


MODELS: dict[tuple[str, ...], type[Part]] = {
    (): Dataset,
    ("ids",): Ids,
    ("time",): Time,
    ("log",): LogPart,
    ("log", "columns"): LogColumns,
    ("items",): ItemsPart,
    ("items", "columns"): ItemColumns,
    ("label_events",): LabelsPart,
    ("label_events", "columns"): LabelColumns,
    ("log", "time"): Time,
    ("items", "time"): Time,
    ("label_events", "time"): Time,
}


def _fault(fault: dict[str, Any]) -> str:
    place = tuple(str(part) for part in fault["loc"])
    name = ".".join(place) or "the mapping"
    if fault["type"] == "extra_forbidden":
        model = MODELS.get(place[:-1])
        known = list(model.model_fields) if model else []
        close = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        return f"unknown key {name}" + (
            f"; did you mean {'.'.join([*place[:-1], close[0]])}?" if close else f"; known: {', '.join(known)}"
        )
    if fault["type"] == "missing":
        model = MODELS.get(place[:-1])
        about = model.model_fields[place[-1]].description if model and place[-1] in model.model_fields else None
        return f"{name} is missing" + (f" ({about})" if about else "")
    message = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    return f"{name}: {message}" + (f" (got {given!r})" if isinstance(given, str | int | float | bool) else "")
