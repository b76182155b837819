"""Each user's mean embedding, for requests whose pair was not computed.

Reads the pair embeddings computed in (as_of - serving.user_mean_hours, as_of], takes the latest of each pair within one
model version, and writes their mean per user to user_embeddings. Optionally younger or likelier pairs count more.
A window without embeddings gives an empty slice.
"""

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.log import recent_pair_embeddings
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.versions import model_version_at
from solaris_udf.means import MEANS_DDL, Weighting, user_means


class Settings(Section):
    """The [aggregate_users] section."""

    section = "aggregate_users"
    half_life_hours: float = Field(0.0, ge=0, description="A pair counts half as much after this long; 0: all the same")
    weight_by_probability: bool = Field(False, description="Weight pairs by the verifier's probability of being scored")


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


def run(run: Run, settings: Settings) -> Report:
    """Loads the window's pairs, takes the mean per user, saves the slice."""
    window = recent_pair_embeddings(run.tables, run.as_of, run.config.serving.user_mean_hours)
    version = model_version_at(run, window)
    pairs = window.where(F.col("model_version") == (version or ""))
    weighting = Weighting(micros(run.as_of), settings.half_life_hours, settings.weight_by_probability)
    means = means_per_user(pairs, weighting).persist()
    try:
        counts = means.agg(
            F.coalesce(F.sum("pairs_seen"), F.lit(0)).alias("pairs"),
            F.count("reason").alias("rejected"),
            F.count("embedding").alias("users"),
        ).first()
        assert counts is not None
        run.check_reject_rate(counts.rejected, counts.pairs)
        rejected = run.reject(means.where(F.col("reason").isNotNull()), count=counts.rejected)
        written = run.write(
            means.where(F.col("reason").isNull()).select(
                "user_id",
                "embedding",
                F.lit("float16").alias("codec"),
                F.lit(version or "").alias("model_version"),
                "pair_count",
                F.timestamp_micros("newest_micros").alias("newest_at"),
            ),
            "user_embeddings",
        )
    finally:
        means.unpersist()
    pairs_per_user = (counts.pairs - counts.rejected) / written if written else 0.0
    return Report(counts.pairs, written, rejected, {"users": written, "pairs_per_user": pairs_per_user})


if __name__ == "__main__":
    main("aggregate_users")
