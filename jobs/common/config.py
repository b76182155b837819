"""Configuration: typed sections with defaults in code, overridden by TOML files, the environment and --set.

A job's section is the `Settings` class in the job's own file; sections that several jobs share are here. Later layers
win: defaults, each --config file in order, environment (`SOLARIS__SECTION__KEY=value`), each --set section.key=value.
"""

import difflib
import hashlib
import importlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jobs import JOBS
from jobs.common.errors import UserError

ENV_PREFIX = "SOLARIS__"
Tier = Literal["pair", "user_mean", "neighbor_pair", "neighbor_mean", "cold"]


# What is written and read as plain files.
FILES = ("models", "staging", "snapshots", "reports")
# What a setting that ends in such a word counts, in hours.
UNITS = {"minutes": 1 / 60, "hours": 1.0, "days": 24.0}
LONGEST_HOURS = 100 * 366 * 24.0


class Section(BaseModel):
    """A section of the config. Unknown keys, numbers that are not finite and times of over a century are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    section: ClassVar[str]

    @model_validator(mode="after")
    def _no_credentials_in_uris(self) -> Self:
        """Before they could reach a log or a table. The message does not repeat the value either."""
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, str) and re.match(r"s3[an]?://(?:[^/]*|[^@]*:[^@]*)@", value):
                raise ValueError(f"{key} holds credentials; give them as AWS_* environment variables or as a role")
        return self

    @model_validator(mode="after")
    def _durations_fit_the_calendar(self) -> Self:
        for key in type(self).model_fields:
            hours = UNITS.get(key.rpartition("_")[2])
            value = getattr(self, key)
            for number in value.values() if isinstance(value, dict) else (value,):
                if hours and isinstance(number, int | float) and number * hours > LONGEST_HOURS:
                    raise ValueError(f"{key} = {number:g} is more than a century")
        return self


class Storage(Section):
    """Where everything lives."""

    section = "storage"
    root: str = Field(
        ".solaris/local",
        min_length=1,
        description="Folder or URI that holds tables/, raw/, and without storage.files all else",
    )
    files: str = Field(
        "",
        description="Mounted folder for models/, staging/, snapshots/, reports/; needed where root is a URI",
    )

    @field_validator("root", "files")
    @classmethod
    def _plain(cls, place: str) -> str:
        return place if re.match(r"file://(?!/)", place) else re.sub(r"^file:/+", "/", place)

    @model_validator(mode="after")
    def _files_on_a_disk(self) -> Self:
        if "://" in self.files:
            raise ValueError(f"files = {self.files} is a URI; readers map these files, so it must be a mounted folder")
        if "://" in self.root and not self.files:
            raise ValueError(
                f"root = {self.root} is a URI and files is empty; name a mounted folder for models and snapshots in "
                "storage.files"
            )
        return self


class Spark(Section):
    """The Spark session, where spark-submit has not decided already."""

    section = "spark"
    master: str = Field("local[*]", description="Used only when no master is set from outside")
    driver_memory: str = Field(
        "3g", pattern=r"^[1-9]\d*[kmgtKMGT]$", description="JVM heap of the driver; in local mode of everything"
    )
    shuffle_partitions: int = Field(200, ge=1)
    task_cpus: int = Field(1, ge=1, description="CPUs a task; BLAS, OpenMP, torch and faiss get as many threads")
    parallel_jobs: int = Field(2, ge=1, description="Jobs of a slice that `solaris run` runs side by side at most")
    arrow_batch_mb: int = Field(64, ge=1, description="Arrow batches are cut at this size, whatever the rows' width")
    jars_dir: str = Field("", description="Folder with the Delta jars; empty: the one that `make setup` filled")
    conf: dict[str, str] = Field(default_factory=dict, description="Any further Spark properties")


class Window(Section):
    """Slices and windows."""

    section = "window"
    hours: float = Field(6.0, gt=0, description="Hours from one slice to the next: the window that a run predicts for")

    @model_validator(mode="after")
    def _whole_seconds(self) -> "Window":
        if timedelta(hours=min(self.hours, LONGEST_HOURS)) % timedelta(seconds=1):
            raise ValueError(f"hours = {self.hours} is no whole number of seconds; slices are named by the second")
        return self


class Log(Section):
    """The interaction log."""

    section = "log"
    dataset: str = Field("world", description="Name of a mapping in conf/datasets, or a path to a mapping file")
    path: str = Field("", description="Where the raw log is; empty: the mapping's own path below storage.root")


class Serving(Section):
    """What a lookup answers, shared by export, reader, audit and join."""

    section = "serving"
    ttl_hours: float = Field(24.0, gt=0, description="A pair embedding older than this is not served")
    user_mean_hours: float = Field(24.0, gt=0, description="The user mean is over the pair embeddings of this long")
    max_user_age_hours: float = Field(48.0, gt=0, description="A user-level vector older than this is not served")
    tiers: tuple[Tier, ...] = Field(
        ("pair", "user_mean", "neighbor_pair", "neighbor_mean"),
        description="Order of the hierarchy; cold, if any, comes last, after both means",
    )
    min_similarity: float = Field(0.0, ge=-1, le=1, description="A less similar neighbour answers nothing")
    neighbors: int = Field(10, ge=1, description="Neighbours kept for each user")
    rollout_share: float = Field(
        0.8,
        ge=0,
        description="A new model's embeddings are served once its fresh pairs are this share of the older model's",
    )
    publish_delay_minutes: float = Field(
        10.0, ge=0, description="From a run's as_of until its snapshot is taken as live"
    )

    @model_validator(mode="after")
    def _good_order(self) -> "Serving":
        if len(set(self.tiers)) != len(self.tiers):
            raise ValueError(f"tiers names one twice: {list(self.tiers)}")
        if "cold" in self.tiers and not {"user_mean", "neighbor_mean"} <= set(self.tiers[: self.tiers.index("cold")]):
            raise ValueError(
                f"tiers must name cold after user_mean and neighbor_mean, for users with neither: {list(self.tiers)}"
            )
        return self


class Quality(Section):
    """Limits past which a run fails and publishes nothing."""

    section = "quality"
    max_reject_rate: float = Field(0.05, ge=0, le=1, description="Rejected rows / rows read, past which a run fails")
    min_rows_for_rate: int = Field(100, ge=1, description="Below this many rows the rate is not judged")


COMMON_SECTIONS: tuple[type[Section], ...] = (Storage, Spark, Window, Log, Serving, Quality)
SectionT = TypeVar("SectionT", bound=Section)


def section_types() -> dict[str, type[Section]]:
    """Every section of the config by name: the common ones and each job's Settings."""
    found = {section.section: section for section in COMMON_SECTIONS}
    for job in JOBS:
        settings = importlib.import_module(f"jobs.{job}").Settings
        if settings.section != job:
            raise TypeError(f"jobs/{job}.py: Settings.section is {settings.section!r}, not {job!r}")
        found[job] = settings
    return found


@dataclass(frozen=True)
class Config:
    """The resolved config: each section validated, by name."""

    sections: Mapping[str, Section]

    def get(self, kind: type[SectionT]) -> SectionT:
        """The section of that type."""
        found = self.sections[kind.section]
        assert isinstance(found, kind), f"section {kind.section} is a {type(found)}"
        return found

    @property
    def storage(self) -> Storage:
        return self.get(Storage)

    @property
    def spark(self) -> Spark:
        return self.get(Spark)

    @property
    def window(self) -> Window:
        return self.get(Window)

    @property
    def log(self) -> Log:
        return self.get(Log)

    @property
    def serving(self) -> Serving:
        return self.get(Serving)

    @property
    def quality(self) -> Quality:
        return self.get(Quality)

    @property
    def hash(self) -> str:
        """Hash of everything that can change a result; where Spark runs does not."""
        content = {name: section.model_dump(mode="json") for name, section in self.sections.items() if name != "spark"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def roots(self) -> list[str]:
        """The folder or URI of the tables, and that of the files if it is another."""
        return list(dict.fromkeys([self.path(), self.path(FILES[0]).removesuffix(f"/{FILES[0]}")]))

    def path(self, *parts: str) -> str:
        """A path or URI below storage.root, or storage.files for what is read as files; a local one is absolute, since
        Spark's workers run elsewhere."""
        root = (self.storage.files if parts and parts[0] in FILES else "") or self.storage.root
        if "://" not in root:
            root = str(Path(root).expanduser().absolute())
        return "/".join([root.rstrip("/"), *parts])


def on_disk(path: str | Path) -> str:
    """The URI by which Spark reads and writes a local path, whatever the cluster's default file system is."""
    return f"file://{path}"


def load_config(
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolves all layers and validates every section.

    Raises UserError that lists every fault at once, each with the key, where it came from and the nearest valid name.
    """
    layers: list[tuple[str, dict[str, Any]]] = [(str(file), _read_toml(Path(file))) for file in files]
    layers.append(("environment", _from_environment(os.environ if environ is None else environ)))
    layers.extend((f"--set {text}", _from_override(text)) for text in overrides)

    types = section_types()
    faults: list[str] = []
    values: dict[str, dict[str, Any]] = {name: {} for name in types}
    for origin, layer in layers:
        for name, content in layer.items():
            if name not in types:
                faults.append(f"{origin}: unknown section [{name}]{_nearest(name, types)}")
                continue
            if not isinstance(content, dict):
                faults.append(f"{origin}: {name} is a section, write [{name}] and its keys below it")
                continue
            for key in content:
                if key not in types[name].model_fields:
                    faults.append(f"{origin}: unknown key {name}.{key}{_nearest(key, types[name].model_fields)}")
            known = {key: value for key, value in content.items() if key in types[name].model_fields}
            values[name].update(known)
    sections: dict[str, Section] = {}
    for name, kind in types.items():
        try:
            sections[name] = kind(**values[name])
        except ValidationError as error:
            for fault in error.errors():
                place = ".".join([name, *(str(part) for part in fault["loc"])])
                given = "" if fault["type"] == "missing" else f" (got {fault['input']!r})" if fault["loc"] else ""
                faults.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}{given}")
    if faults:
        raise UserError("config: " + "; ".join(faults))
    return Config(sections)


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"config file {path} can't be read: {error.strerror}") from None


def _parse_value(text: str) -> Any:
    """A TOML value where it is one, else the text itself, so that `--set log.dataset=world` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            parts = name[len(ENV_PREFIX) :].lower().split("__")
            if len(parts) != 2:
                raise UserError(f"environment variable {name}: write it as {ENV_PREFIX}SECTION__KEY")
            layer.setdefault(parts[0], {})[parts[1]] = _parse_value(text)
    return layer


def _from_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise UserError(f"--set {text!r}: write it as section.key=value")
    return {section: {name: _parse_value(value.strip())}}
