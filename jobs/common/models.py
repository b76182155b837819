"""Where trained models live: models/KIND/SLICE/ below the storage root, chosen by logical time."""

from datetime import datetime
from pathlib import Path

from jobs.common.clock import slice_of
from jobs.common.config import Config
from jobs.common.errors import UserError


def model_folder(config: Config, kind: str, as_of: datetime) -> Path:
    """The folder that a training run at as_of writes. kind: foundation or verifier."""
    return Path(config.path("models", kind)) / slice_of(as_of)


def models_until(config: Config, kind: str, as_of: datetime) -> list[Path]:
    """The models trained at or before as_of, newest first: a backfill gets those of its time.

    A folder counts once it holds model.json, which trainers write last.
    """
    folder = Path(config.path("models", kind))
    names = [path.parent.name for path in folder.glob("*/model.json") if path.parent.name <= slice_of(as_of)]
    return [folder / name for name in sorted(names, reverse=True)]


def latest_model(config: Config, kind: str, as_of: datetime) -> Path | None:
    """The newest model trained at or before as_of; None if there is none."""
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
