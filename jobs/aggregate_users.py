"""Each user's mean embedding, for requests whose pair was not computed.

Reads the pair embeddings computed in (as_of - serving.user_mean_hours, as_of], takes the latest of each pair within one
model version, and writes their mean per user to user_embeddings. Optionally younger or likelier pairs count more. Sums
per user and slice are kept in user_sums, so that a run reads the pairs of its own slice and those that they replace,
not the whole window again. A window without embeddings gives an empty slice.
"""

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.log import recent_pair_embeddings
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.user_sums import addition, store
from jobs.common.versions import model_version_at
from solaris_udf.means import MEANS_DDL, Weighting, user_means
from solaris_udf.partial_means import means_of_sums


class Settings(Section):
    """The [aggregate_users] section."""

    section = "aggregate_users"
    half_life_hours: float = Field(
        0.0,
        ge=0,
        description="A pair counts half as much after this long. 0, the default: all pairs of the window count the "
        "same, the mean without a number to tune; docs/evaluation.md says how to compare",
    )
    incremental: bool = Field(True, description="Keep sums per slice; false: every run reads the whole window")
    weight_by_probability: bool = Field(
        False,
        description="Weight pairs by the verifier's probability of being scored. Off by default: the mean answers the "
        "user's other rows, of which that probability says nothing",
    )


def means_per_user(pairs: DataFrame, weighting: Weighting) -> DataFrame:
    """The mean per user, or a refusal, as MEANS_DDL, from pair_embeddings rows.

    One shuffle of the stored bytes. A task streams its users in order and holds one Arrow batch and one open user,
    however many pairs a user has.
    """
    stream = (
        pairs.select(
            "user_id",
            "item_id",
            F.unix_micros("as_of").alias("computed_micros"),
            "embedding",
            "codec",
            "probability",
            "run_id",
        )
        .repartition("user_id")
        .sortWithinPartitions("user_id", "item_id", F.col("computed_micros").desc(), F.col("run_id").desc())
        .drop("run_id")
    )
    return stream.mapInArrow(lambda batches: user_means(batches, weighting), MEANS_DDL)


def means_of_stored(sums: DataFrame, weighting: Weighting) -> DataFrame:
    """The mean per user, as MEANS_DDL, from all sums of the window. One shuffle."""
    stream = sums.repartition("user_id").sortWithinPartitions("user_id", "computed_micros", "pair_count", "weight")
    return stream.mapInArrow(lambda batches: means_of_sums(batches, weighting), MEANS_DDL)


def run(run: Run, settings: Settings) -> Report:
    """Loads the window's pairs, takes the mean per user, saves the slice."""
    hours = run.config.serving.user_mean_hours
    window = recent_pair_embeddings(run.tables, run.as_of, hours)
    version = model_version_at(run, window)
    pairs = window.where(F.col("model_version") == (version or ""))
    weighting = Weighting(micros(run.as_of), settings.half_life_hours, settings.weight_by_probability)
    metrics: dict[str, float] = {}
    held: list[DataFrame] = []
    try:
        if settings.incremental:
            basis = f"{version} {hours:g} h{' by probability' if settings.weight_by_probability else ''}"
            added = addition(run, pairs, hours, basis, settings.weight_by_probability)
            read = added.sums.persist()
            held.append(read)
            metrics["full"] = float(added.full)
            run.check_reject_rate(*_rejects(read))
            means = means_of_stored(store(run, added, read, basis), weighting).persist()
            refused = read.select("reason", "row").unionByName(means.select("reason", "row"))
        else:
            read = means = means_per_user(pairs, weighting).persist()
            refused = read.select("reason", "row")
        held.append(means)
        rejected, seen = _rejects(read)
        if read is not means:
            rejected += _rejects(means)[0]
        run.check_reject_rate(rejected, seen)
        rejected = run.reject(refused.where(F.col("reason").isNotNull()), count=rejected)
        in_means = means.where(F.col("reason").isNull())
        written = run.write(
            in_means.select(
                "user_id",
                "embedding",
                F.lit("float16").alias("codec"),
                F.lit(version or "").alias("model_version"),
                "pair_count",
                F.timestamp_micros("newest_micros").alias("newest_at"),
            ),
            "user_embeddings",
        )
        counted = in_means.agg(F.coalesce(F.sum("pair_count"), F.lit(0)).alias("pairs")).first()
        assert counted is not None
    finally:
        for frame in held:
            frame.unpersist()
    metrics |= {"users": written, "pairs_per_user": counted.pairs / written if written else 0.0}
    return Report(seen, written, rejected, metrics)


def _rejects(rows: DataFrame) -> tuple[int, int]:
    """Rejected rows and pairs read among PARTIAL_DDL or MEANS_DDL rows."""
    counts = rows.agg(
        F.count("reason").alias("rejected"), F.coalesce(F.sum("pairs_seen"), F.lit(0)).alias("pairs")
    ).first()
    assert counts is not None
    return counts.rejected, counts.pairs


if __name__ == "__main__":
    main("aggregate_users")
