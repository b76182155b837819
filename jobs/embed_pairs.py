"""embed_pairs: runs the foundation model on the pairs that predict_pairs selected.

Reads candidate_pairs of the slice (action compute), each user's history and the items as of the run, and the foundation
model that embed_pairs.model names, or else the newest trained up to then. Writes pair_embeddings, and refused pairs
(NaN, wrong length) to rejected_rows.
Work is kept in chunks below staging/, so a run that was killed goes on where it stopped and no pair is computed twice.
"""

import json
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from jobs.common.alignment import decide_alignment, load_alignment
from jobs.common.clock import ts
from jobs.common.config import Section, on_disk
from jobs.common.errors import RunFailed, UserError
from jobs.common.item_table import write_item_table
from jobs.common.log import histories_at
from jobs.common.main import main
from jobs.common.models import model_roots, require_model
from jobs.common.runs import Report, Run
from solaris_udf.foundation.contract import Description, load_description, sha256_of
from solaris_udf.foundation.features import COUNTS, ModelError
from solaris_udf.foundation.inference import Limits
from solaris_udf.foundation.udf import OUTPUT_DDL, EmbedFunction, embed_udf

RESULTS_DDL = "user_id BIGINT, item_id BIGINT, probability DOUBLE, embedding BINARY, reason STRING"
PAIR = ["user_id", "item_id"]


class Settings(Section):
    """The [embed_pairs] section."""

    section = "embed_pairs"
    model: str = Field(
        "",
        description="Model folder that every job works with from now on, whatever its slice; empty: the newest below "
        "storage.root/models/foundation",
    )
    align: bool = Field(
        False,
        description="Turn a new model's vectors onto the old one's space (orthogonal Procrustes), decided in the new "
        "model's first slice on pairs that the old one embedded",
    )
    align_pairs: int = Field(20_000, ge=1, description="Pairs that an alignment is fitted on, at most")
    model_roots: tuple[str, ...] = Field((), description="Folders that may hold models besides storage.root/models")
    codec: Literal["float16", "int8"] = Field("float16", description="How embeddings are stored")
    batch_tokens: int = Field(65_536, ge=1, description="History events that one batch of users or pairs may hold")
    batch_pairs: int = Field(8_192, ge=1, description="Pairs that one batch may hold")
    batch_mb: int = Field(
        32,
        ge=1,
        description="Memory that one batch of users or pairs may take in the model; weights come on top. 32 suits a "
        "CPU's cache, a GPU wants 512 or more",
    )
    chunk_pairs: int = Field(1_000_000, ge=1, description="Progress is saved after so many pairs: what a kill can lose")
    task_pairs: int = Field(50_000, ge=1, description="About how many pairs one Spark task embeds")
    row_pairs: int = Field(20_000, ge=1, description="Users with more pairs than this are split into several rows")
    gpus: float = Field(0.0, ge=0, description="GPUs a task, asked for by this stage only; 0: none, CPU inference")
    half_precision: bool = Field(True, description="Half precision on a GPU")
    compile: bool = Field(False, description="torch.compile the model: slower start, faster long runs")


def wanted_pairs(candidates: DataFrame) -> DataFrame:
    """The selected pairs that must be computed: user_id, item_id, probability."""
    return candidates.where(F.col("action") == "compute").select("user_id", "item_id", "probability")


def grouped_by_user(pairs: DataFrame, histories: DataFrame, partitions: int, row_pairs: int) -> DataFrame:
    """The model's input rows without `at`: one per user with all their item ids, sorted, and those pairs'
    probabilities; several for a giant user. pairs: user_id, item_id, probability.

    The number of partitions is given, not left to Spark, which would put a small table with much work into one task.
    """
    users = (
        pairs.repartition(partitions, "user_id")
        .groupBy("user_id")
        .agg(F.sort_array(F.collect_list(F.struct("item_id", "probability"))).alias("pairs"))
        .withColumn("part", F.explode(F.sequence(F.lit(0), F.floor((F.size("pairs") - 1) / row_pairs).cast("int"))))
        .withColumn("pairs", F.slice("pairs", F.col("part") * row_pairs + 1, row_pairs))
        .select(
            "user_id",
            F.col("pairs")["item_id"].alias("item_ids"),
            F.col("pairs")["probability"].alias("probabilities"),
        )
    )
    known = ["user_id", "shown", "clicked", *COUNTS]
    return users.join(histories, on="user_id", how="left").select(*known, "item_ids", "probabilities")


def tasks_of(pairs: int, task_pairs: int, parallel: int) -> int:
    """How many tasks embed so many pairs, where `parallel` run at once: whole rounds, so that no slot idles at the end,
    as few as hold at most task_pairs a task."""
    return parallel * max(1, -(-pairs // (task_pairs * parallel)))


def rejections(refused: DataFrame) -> DataFrame:
    """Refused pairs as reason and row."""
    row = F.to_json(F.struct("user_id", "item_id", "model_version"))
    return refused.select("reason", row.alias("row"))


def run(run: Run, settings: Settings) -> Report:
    """Embeds what is missing in chunks, then publishes all of the slice at once."""
    folder, description = _model(run)
    items = write_item_table(run)
    histories = histories_at(run.tables, run.as_of)
    limits = Limits(settings.batch_tokens, settings.batch_pairs, settings.batch_mb << 20)

    def embed_with(rotation: npt.NDArray[np.float32] | None) -> EmbedFunction:
        return embed_udf(
            folder,
            items,
            codec=settings.codec,
            threads=run.config.spark.task_cpus,
            limits=limits,
            half=settings.half_precision,
            compiled=settings.compile,
            roots=model_roots(run.config),
            rotation=rotation,
        )

    def as_now(pairs: DataFrame) -> DataFrame:
        """The pairs as the new model sees them, not turned."""
        partitions = run.spark.sparkContext.defaultParallelism
        given = pairs.withColumn("probability", F.lit(None).cast("double"))
        inputs = grouped_by_user(given, histories, partitions, settings.row_pairs).withColumn("at", ts(run.as_of))
        return inputs.mapInArrow(embed_with(None), OUTPUT_DDL, profile=_profile(settings, run.config.spark.task_cpus))

    aligned = load_alignment(run.config, description.version)
    if settings.align and aligned is None:
        aligned = decide_alignment(run, description, as_now, settings.codec, settings.align_pairs)
    rotation = aligned.matrix if aligned else None
    embed = embed_with(rotation)
    staging = _Staging(run, description, _fingerprint(run, settings, description, histories, items, rotation))
    wanted = wanted_pairs(run.tables.read_slice("candidate_pairs", run.as_of))
    before = staging.done()
    todo = wanted if before is None else wanted.join(before, on=PAIR, how="left_anti")
    counts = todo.agg(F.count("*").alias("pairs"), F.countDistinct("user_id").alias("users")).first()
    asked = wanted.agg(*_identity()).first()
    assert counts is not None and asked is not None
    started = time.monotonic()
    _embed_chunks(run, settings, todo, histories, embed, staging, counts.pairs)
    seconds = time.monotonic() - started
    embedded, rejected = _publish(run, settings, wanted, asked, before, staging, description)
    return Report(
        rows_in=asked.rows,
        rows_out=embedded,
        rows_rejected=rejected,
        metrics={
            "pairs": counts.pairs,
            "users": counts.users,
            "reused": asked.rows - counts.pairs,
            "inference_seconds": seconds,
            "pairs_per_second": counts.pairs / seconds if counts.pairs else 0.0,
            **(aligned.metrics if aligned else {}),
        },
    )


def _model(run: Run) -> tuple[Path, Description]:
    folder = require_model(run.config, "foundation", run.as_of)
    try:
        return folder, load_description(folder, model_roots(run.config))
    except ModelError as error:
        raise UserError(f"foundation model: {error}") from None


def _fingerprint(
    run: Run,
    settings: Settings,
    description: Description,
    histories: DataFrame,
    items: Path,
    rotation: npt.NDArray[np.float32] | None,
) -> str:
    """Names everything that decides an embedding of this slice.

    Stored work counts only under the same name: when histories or items were rewritten since, it is stale. The runs
    that wrote the histories stand for their content.
    """
    runs = histories.select("slice", "run_id").distinct().orderBy("slice", "run_id").collect()
    content = [description.version, settings.codec, sha256_of(items), *(f"{row.slice} {row.run_id}" for row in runs)]
    if rotation is not None:
        content.append(sha256(rotation.tobytes()).hexdigest())
    return sha256("\n".join(content).encode()).hexdigest()[:12]


class _Staging:
    """Finished chunks of one slice, model version and fingerprint; others of the slice are removed.

    staging/embed_pairs/<slice>/<fingerprint>/chunk-00000/ are parquet folders, complete once they hold _SUCCESS.
    published.json replaces them when the slice stands in pair_embeddings.
    """

    def __init__(self, run: Run, description: Description, fingerprint: str) -> None:
        self._run = run
        self._version = description.version
        parent = Path(run.config.path("staging", "embed_pairs", run.slice))
        self.folder = parent / fingerprint
        self._marker = self.folder / "published.json"
        for other in parent.glob("*"):
            if other != self.folder:
                shutil.rmtree(other)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._earlier = set(self._complete())

    def done(self) -> DataFrame | None:
        """What earlier runs embedded: RESULTS_DDL. None for nothing."""
        if self._marker.exists():
            stored = (
                self._run.tables.read_slice("pair_embeddings", self._run.as_of)
                .where(F.col("model_version") == self._version)
                .select(*PAIR, "probability", "embedding", F.lit(None).cast("string").alias("reason"))
            )
            if not self._earlier:
                return stored
            # A run killed after publishing leaves chunks of pairs that are stored already.
            return stored.unionByName(self._read(self._earlier).join(stored, on=PAIR, how="left_anti"))
        return self._read(self._earlier) if self._earlier else None

    def made(self) -> DataFrame:
        """What this run embedded: RESULTS_DDL."""
        return self._read(set(self._complete()) - self._earlier)

    def next_chunk(self) -> str:
        """A folder that no complete chunk has."""
        return str(self.folder / f"chunk-{len(self._complete()):05d}")

    def publish(self) -> None:
        """The chunks are in pair_embeddings now. The marker first: with neither, all would be computed again."""
        self._marker.write_text(json.dumps({"run_id": self._run.run_id}) + "\n")
        for chunk in self.folder.glob("chunk-*"):
            shutil.rmtree(chunk)

    def _complete(self) -> list[str]:
        return sorted(str(chunk.parent) for chunk in self.folder.glob("chunk-*/_SUCCESS"))

    def _read(self, chunks: set[str]) -> DataFrame:
        spark = self._run.spark
        if not chunks:
            return spark.createDataFrame([], RESULTS_DDL)
        return spark.read.schema(RESULTS_DDL).parquet(*map(on_disk, sorted(chunks)))


def _embed_chunks(
    run: Run,
    settings: Settings,
    todo: DataFrame,
    histories: DataFrame,
    embed: EmbedFunction,
    staging: _Staging,
    pairs: int,
) -> None:
    """One Spark job and one parquet folder a chunk: the only place where the model is called."""
    if not pairs:
        return
    chunks = -(-pairs // settings.chunk_pairs)
    parallel = run.spark.sparkContext.defaultParallelism
    partitions = tasks_of(-(-pairs // chunks), settings.task_pairs, parallel)
    profile = _profile(settings, run.config.spark.task_cpus)
    for chunk in range(chunks):
        part = todo if chunks == 1 else todo.where(F.pmod(F.xxhash64("user_id"), F.lit(chunks)) == chunk)
        inputs = grouped_by_user(part, histories, partitions, settings.row_pairs).withColumn("at", ts(run.as_of))
        (
            inputs.mapInArrow(embed, OUTPUT_DDL, profile=profile)
            .select(*PAIR, "probability", "embedding", "reason")
            .write.mode("overwrite")
            .parquet(on_disk(staging.next_chunk()))
        )


def _profile(settings: Settings, task_cpus: int) -> ResourceProfile | None:
    """Asks for GPUs for this stage only, so that other stages hold none."""
    if not settings.gpus:
        return None
    return ResourceProfileBuilder().require(TaskResourceRequests().cpus(task_cpus).resource("gpu", settings.gpus)).build


def _identity() -> tuple[Column, Column]:
    """How many pairs there are, and the exclusive or of their hashes, which tells a lost pair that a doubled one makes
    up for in the count."""
    return F.count("*").alias("rows"), F.expr("coalesce(bit_xor(xxhash64(user_id, item_id)), 0)").alias("identity")


def _publish(
    run: Run,
    settings: Settings,
    wanted: DataFrame,
    asked: Row,
    before: DataFrame | None,
    staging: _Staging,
    description: Description,
) -> tuple[int, int]:
    """Writes embeddings and rejections of all wanted pairs, whose _identity is asked; returns how many of each.

    What this run made goes from its chunks to the table without a shuffle; what earlier runs made is joined with the
    wanted pairs, which may have been selected anew since.
    """
    results = staging.made()
    if before is not None:
        earlier = wanted.join(before.drop("probability"), on=PAIR).select(*results.columns).persist()
        results = results.unionByName(earlier)
    try:
        counts = results.agg(
            *_identity(),
            F.count_if(F.col("embedding").isNotNull()).alias("embedded"),
            F.count("reason").alias("rejected"),
        ).first()
        assert counts is not None
        complete = (counts.rows, counts.identity) == (asked.rows, asked.identity)
        if not complete or counts.embedded + counts.rejected != asked.rows:
            raise RunFailed(
                f"embed_pairs {run.slice}: {asked.rows} pairs in, but {counts.embedded} embedded and {counts.rejected} "
                f"rejected; nothing was published; run it again, and remove {staging.folder} if that fails too"
            )
        run.check_reject_rate(counts.rejected, asked.rows)
        results = results.withColumns({"codec": F.lit(settings.codec), "model_version": F.lit(description.version)})
        rejected = run.reject(rejections(results.where(F.col("embedding").isNull())), counts.rejected)
        embedded = run.write(results.where(F.col("embedding").isNotNull()).drop("reason"), "pair_embeddings")
    finally:
        if before is not None:
            earlier.unpersist()
    staging.publish()
    return embedded, rejected


if __name__ == "__main__":
    main("embed_pairs")
