"""Which trained models there are, chosen by logical time: models/KIND/SLICE/ below the storage root, and the foundation
model that embed_pairs.model names."""

from datetime import datetime
from pathlib import Path

from jobs.common.clock import slice_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from solaris_udf.foundation.contract import Description, read_description
from solaris_udf.foundation.features import ModelError


def model_folder(config: Config, kind: str, as_of: datetime) -> Path:
    """The folder that a training run at as_of writes. kind: foundation or verifier."""
    return Path(config.path("models", kind)) / slice_of(as_of)


def models_until(config: Config, kind: str, as_of: datetime) -> list[Path]:
    """The models that a run at as_of may use, the preferred one first: every job asks here.

    Those trained at or before as_of, newest first, so that a backfill gets those of its time; a folder counts once it
    holds model.json, which trainers write last. A foundation model that embed_pairs.model names comes before them.
    """
    folder = Path(config.path("models", kind))
    names = [path.parent.name for path in folder.glob("*/model.json") if path.parent.name <= slice_of(as_of)]
    found = [folder / name for name in sorted(names, reverse=True)]
    named = _named(config) if kind == "foundation" else None
    if named is None:
        return found
    return [named, *(path for path in found if path.resolve() != named.resolve())]


def latest_model(config: Config, kind: str, as_of: datetime) -> Path | None:
    """The first of models_until; None if there is none."""
    return next(iter(models_until(config, kind, as_of)), None)


def require_model(config: Config, kind: str, as_of: datetime) -> Path:
    """latest_model, or a UserError that names the job to run."""
    found = latest_model(config, kind, as_of)
    if found is None:
        raise UserError(
            f"no {kind} model was trained at or before {as_of.isoformat()} below "
            f"{config.path('models', kind)}; run train_{kind} first"
        )
    return found


def trained_at(config: Config, folder: Path) -> str | None:
    """The slice from which on a foundation model's folder counts; None for a named one, of which nobody knows."""
    return folder.name if folder.parent == Path(config.path("models", "foundation")) else None


def model_roots(config: Config) -> list[str]:
    """The folders that may hold foundation models: load none from elsewhere."""
    return [config.path("models"), *config.sections["embed_pairs"].model_dump()["model_roots"]]


def declared(config: Config, folder: Path) -> Description:
    """What a foundation model's model.json says; the programs beside it are not read. Raises UserError."""
    try:
        return read_description(folder, model_roots(config))
    except ModelError as error:
        raise UserError(f"foundation model: {error}") from None


def _named(config: Config) -> Path | None:
    named = config.sections["embed_pairs"].model_dump()["model"]
    # Absolute: Spark's workers run elsewhere.
    return Path(named).expanduser().absolute() if named else None
