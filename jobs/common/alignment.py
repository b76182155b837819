"""The alignment of a model version's space: decided once, before the version's first pair is stored, then kept."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.config import Config
from jobs.common.errors import RunFailed, UserError
from jobs.common.log import latest_per, recent_pair_embeddings
from jobs.common.runs import Run
from solaris_udf.codec import decode
from solaris_udf.foundation.alignment import fit_rotation
from solaris_udf.foundation.contract import Description

# With fewer pairs a dimension, the fit follows the noise.
PAIRS_A_DIMENSION = 10


@dataclass(frozen=True)
class Alignment:
    """What alignments/<version>.json says. to: the version whose space it was turned onto, None if there was none (the
    rotation is None then); pairs: how many the fit saw; errors as in solaris_udf.foundation.alignment.Fit."""

    version: str
    to: str | None = None
    rotation: list[list[float]] | None = None
    pairs: int = 0
    error: float = 0.0
    error_before: float = 0.0

    @property
    def matrix(self) -> npt.NDArray[np.float32] | None:
        """The rotation, float32 [d, d]."""
        return None if self.rotation is None else np.array(self.rotation, dtype=np.float32)

    @property
    def metrics(self) -> dict[str, float]:
        """For job_runs; empty for a version that was not turned."""
        if self.rotation is None:
            return {}
        return {
            "alignment_pairs": self.pairs,
            "alignment_error": self.error,
            "alignment_error_before": self.error_before,
        }


def decide_alignment(
    run: Run, description: Description, embedded: Callable[[DataFrame], DataFrame], codec: str, most_pairs: int
) -> Alignment:
    """Decides and saves the version's alignment: onto the version that has most of the fresh pairs, fitted on a sample
    of at most most_pairs of those, which both versions see, the new one with the user's history of now.

    embedded: user_id, item_id -> those and embedding (as codec, null if refused), by the new model, not turned.

    Not turned are a version without a predecessor, and one that has pairs already, since all of a version's pairs must
    be in one space. Raises UserError for an old space of other dimensions, RunFailed for too few pairs.
    """
    version, dim = description.version, description.embedding_dim
    fresh = recent_pair_embeddings(run.tables, run.as_of, run.config.serving.ttl_hours)
    most = fresh.groupBy("model_version").count().orderBy(F.desc("count"), "model_version").first()
    has_pairs = not run.tables.read("pair_embeddings").where(F.col("model_version") == version).isEmpty()
    if most is None or has_pairs:
        return _saved(run.config, Alignment(version))
    old = latest_per(fresh.where(F.col("model_version") == most.model_version), "user_id", "item_id")
    sample = (
        old.orderBy(F.xxhash64("user_id", "item_id"), "user_id", "item_id")
        .limit(most_pairs)
        .select("user_id", "item_id", F.col("embedding").alias("old"), F.col("codec").alias("old_codec"))
        .persist()
    )
    try:
        new = embedded(sample.select("user_id", "item_id")).select("user_id", "item_id", "embedding")
        both = new.where(F.col("embedding").isNotNull()).join(sample, on=["user_id", "item_id"])
        found = both.orderBy("user_id", "item_id").toArrow()  # at most most_pairs rows
    finally:
        sample.unpersist()
    codecs = found["old_codec"].unique().to_pylist()
    if len(found) < PAIRS_A_DIMENSION * dim or len(codecs) != 1:
        raise RunFailed(
            f"{run.job} {run.slice}: {len(found)} pairs of model {most.model_version} (codecs {codecs}) to align {dim} "
            f"dimensions on, but {PAIRS_A_DIMENSION * dim} of one codec are needed; nothing was published; set "
            "embed_pairs.align = false, or run it when more pairs are fresh"
        )
    vectors = decode(found["old"], codecs[0])
    if vectors.shape[1] != dim:
        raise UserError(
            f"embed_pairs.align: model {version} has {dim} dimensions, {most.model_version} has {vectors.shape[1]}; "
            "only spaces of the same dimensions can be aligned; set embed_pairs.align = false"
        )
    fit = fit_rotation(decode(found["embedding"], codec), vectors)
    rotation = fit.rotation.tolist()
    return _saved(run.config, Alignment(version, most.model_version, rotation, len(found), fit.error, fit.error_before))


def load_alignment(config: Config, version: str) -> Alignment | None:
    """The version's alignment; None if none was ever decided."""
    file = _file(config, version)
    return Alignment(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def _saved(config: Config, alignment: Alignment) -> Alignment:
    """Writes it, atomically, and returns it."""
    file = _file(config, alignment.version)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(alignment)) + "\n", encoding="utf-8")
    partial.replace(file)
    return alignment


def _file(config: Config, version: str) -> Path:
    return Path(config.path("alignments")) / f"{version}.json"
