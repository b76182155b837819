"""FM inference in Spark against the bare model: pairs a second of the same weights on the same inputs and two cores.

    python bench/fm_inference.py [--quick] [--json FILE] [--only demo|large|memory] [--ray PYTHON]

- embed_pairs: the job itself on Delta tables, from candidate pairs to saved chunks: pairs grouped by user and joined
  with the histories, inputs looked up, the model, vectors encoded and written. local[2], one thread a task. Its time is
  the job's own inference_seconds.
- its model stage: the same function alone, from grouped rows in Spark's memory to Spark rows.
- plain loop: what one would write by hand. All inputs lie ready as padded arrays, users sorted by history length; the
  PyTorch modules run on a group of users (the fastest of three sizes), then on their pairs, and the vectors are turned
  into float16. No Spark, nothing looked up, grouped, encoded or written. In one process of two threads and in two of
  one thread; the faster of both is the bar.
- predict_batch_udf: pyspark's function for models, the whole model for each pair.
- Ray Data, with --ray: the same function in two actors, on the same grouped rows, read from their file. PYTHON is the
  interpreter of an environment of its own, with the versions that this one has of torch and pyarrow:
      uv venv --python 3.11 /tmp/ray-python
      uv pip install --python /tmp/ray-python/bin/python 'ray[data]' torch pyarrow 'pandas<3' numpy
      python bench/fm_inference.py --ray /tmp/ray-python/bin/python

Workers are warm: models are loaded before. Repeats are interleaved, figures are medians (of five, and of three for the
large model in full, where a pass takes a minute). Histories have 0 to the full number of events, each user has 50
pairs: 1,000,000 for the demo's model and 150,000 for the large one. The model's weights are random.

Memory is what a worker's resident memory grows by at most, from the loaded model on, against what the settings allow:
spark.arrow_batch_mb for the rows, and embed_pairs.batch_mb twice, for users and for pairs.
"""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fm_data import AT, PAIRS_PER_USER, Subject, make_items, make_model, make_users
from fm_loop import PlainLoop, TwoProcesses
from fm_peers import RayPeer, drained, per_pair
from measure import Figure, arguments, at_least, at_most, interleaved, report
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import jobs.embed_pairs as job
from jobs.common.config import load_config
from jobs.common.runs import Run
from jobs.common.session import build_session
from jobs.common.tables import spark_schema
from jobs.common.terminal import console
from schemas import TABLES
from solaris_udf.codec import decode
from solaris_udf.foundation.inference import OUTPUT_DDL, Limits
from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.udf import embed_udf

TARGETS = {"demo": 0.85, "large": 0.95}
MEMORY_MB = {"arrow_batch_mb": 16, "batch_mb": 64}
SESSION = ("spark.master=local[2]", "spark.driver_memory=3g", "spark.shuffle_partitions=2")


class Job:
    """embed_pairs on tables of these users; each call embeds all pairs anew and notes the job's own seconds."""

    def __init__(self, spark: SparkSession, subject: Subject, folder: Path, rows: Path, items: Path) -> None:
        root = folder / f"root-{subject.description.name}"
        options = [f"storage.root={root}", f"embed_pairs.model={subject.folder}"]
        options += [f'embed_pairs.model_roots=["{folder}"]', *SESSION]
        config = load_config(overrides=options, environ={})
        as_of = datetime.fromtimestamp(AT / 1e6, UTC)
        self.run, self.settings = Run("embed_pairs", spark, config, as_of, "bench"), config.get(job.Settings)
        self.seconds: list[float] = []
        users = spark.read.parquet(str(rows))
        pairs = users.select("user_id", F.explode("item_ids").alias("item_id"))
        self._fill("candidate_pairs", pairs.withColumns({"probability": F.lit(0.5), "action": F.lit("compute")}))
        known = {"checkpoint": F.lit(True), "last_event_time": F.lit(as_of - timedelta(seconds=1))}
        self._fill("user_histories", users.drop("at", "item_ids").withColumns(known))
        self._fill("items", spark.read.parquet(str(items)))

    def _fill(self, name: str, frame: DataFrame) -> None:
        """The table's slice; columns that frame lacks get a value that is allowed."""
        given, own = {"slice", "as_of", "run_id"}, set(frame.columns)
        fillers = {
            "expected_rows": F.lit(0.5),
            "rank": F.lit(1),
            "cost": F.lit(1.0),
            "sources": F.array(F.lit("recent")),
        }
        columns = [
            (F.col(each.name) if each.name in own else fillers.get(each.name, F.lit(None)))
            .cast(each.dataType)
            .alias(each.name)
            for each in spark_schema(TABLES[name])
            if each.name not in given
        ]
        self.run.write(frame.select(*columns), name)

    def __call__(self) -> None:
        shutil.rmtree(self.run.config.path("staging", "embed_pairs"), ignore_errors=True)
        self.seconds.append(job.run(self.run, self.settings).metrics["inference_seconds"])


def largest_difference(stored: pa.Table, loop: PlainLoop) -> float:
    """The largest difference between the stored vectors and the plain loop's."""
    ours = decode(stored["embedding"])
    key = np.lexsort((stored["item_id"].to_numpy(), stored["user_id"].to_numpy()))
    other = np.lexsort((loop.keys[:, 1], loop.keys[:, 0]))
    return float(np.abs(ours[key] - loop().astype(np.float32)[other]).max())


def measured_size(
    spark: SparkSession, size: str, users: int, per_pair_pairs: int, repeats: int, folder: Path, ray: str | None
) -> list[Figure]:
    """Rates of one model size. ray: an interpreter that has Ray."""
    subject, items = make_model(size, folder / size), folder / "items.arrow"
    table = make_users(make_items(items), users, subject)
    rows = folder / f"{size}.parquet"
    pq.write_table(table, rows)
    frame = spark.read.parquet(str(rows)).repartition(2).persist()
    pairs = frame.count() * PAIRS_PER_USER
    embed_pairs = Job(spark, subject, folder, rows, items.with_suffix(".parquet"))
    settings = embed_pairs.settings
    limits = Limits(settings.batch_tokens, settings.batch_pairs, settings.batch_mb << 20)
    embedded = frame.mapInArrow(embed_udf(subject.folder, items, threads=1, limits=limits), OUTPUT_DDL)
    loop = PlainLoop.of(subject, table, ItemTable.open(items))
    loop.tune()
    halves = TwoProcesses(subject, items, [table.take(list(range(place, users, 2))) for place in (0, 1)], loop.group)
    tasks: dict[str, Callable[[], object]] = {"threads": loop, "embed_pairs": embed_pairs, "processes": halves}
    tasks |= {"stage": lambda: drained(embedded), "per pair": per_pair(spark, loop, folder, per_pair_pairs)}
    peer = RayPeer(ray, rows, subject.folder, items, limits) if ray else None
    if peer:
        tasks["ray"] = peer
    seconds = interleaved(tasks, repeats)
    seconds["embed_pairs"] = statistics.median(embed_pairs.seconds[1:])
    if peer:
        seconds["ray"] = statistics.median(peer.seconds[1:])
        peer.close()
    halves.close()
    rates = {name: (per_pair_pairs if name == "per pair" else pairs) / value for name, value in seconds.items()}
    bar = max(rates["threads"], rates["processes"])
    stored = embed_pairs.run.tables.read("pair_embeddings").select("user_id", "item_id", "embedding").toArrow()
    figures = [
        Figure(f"{size}: embed_pairs", rates["embed_pairs"], "pairs/s"),
        Figure(f"{size}: its model stage alone", rates["stage"], "pairs/s"),
        Figure(f"{size}: plain loop, two threads, {loop.group} users a step", rates["threads"], "pairs/s"),
        Figure(f"{size}: plain loop, two processes", rates["processes"], "pairs/s"),
        Figure(f"{size}: predict_batch_udf a pair", rates["per pair"], "pairs/s"),
        *([Figure(f"{size}: Ray Data", rates["ray"], "pairs/s")] if peer else []),
        at_least(f"{size}: embed_pairs / the faster plain loop", rates["embed_pairs"] / bar, "x", TARGETS[size]),
        at_least(f"{size}: model stage / the faster plain loop", rates["stage"] / bar, "x", TARGETS[size]),
        at_least(f"{size}: embed_pairs / predict_batch_udf", rates["embed_pairs"] / rates["per pair"], "x", 20.0),
        at_most(f"{size}: largest difference of a vector's number", largest_difference(stored, loop), "", 1e-3),
    ]
    frame.unpersist()
    return figures


def peak_memory(spark: SparkSession, users: int, folder: Path) -> list[Figure]:
    """What a worker's memory grows by at 1 and 10 times the users."""
    subject = make_model("demo", folder / "demo")
    ids = make_items(folder / "items.arrow")
    limits = Limits(bytes=MEMORY_MB["batch_mb"] << 20)
    embed = embed_udf(subject.folder, folder / "items.arrow", threads=1, limits=limits)

    def watched(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """(resident bytes of the worker with its model and before it works, peak since)."""
        first = next(batches)
        for _ in embed(iter([first.slice(0, 1)])):  # loads
            pass
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = _status("VmRSS")

        def all_of() -> Iterator[pa.RecordBatch]:
            yield first
            yield from batches

        rows = sum(len(batch) for batch in embed(all_of()))
        yield pa.record_batch({"rows": [rows], "before": [before], "peak": [_status("VmHWM")]})

    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(MEMORY_MB["arrow_batch_mb"] << 20))
    figures, allowed = [], MEMORY_MB["arrow_batch_mb"] + 2 * MEMORY_MB["batch_mb"]
    for times in (1, 10):
        file = folder / f"memory-{times}.parquet"
        pq.write_table(make_users(ids, users * times, subject), file)
        frame = spark.read.parquet(str(file)).repartition(2)
        found = frame.mapInArrow(watched, "rows BIGINT, before BIGINT, peak BIGINT").collect()
        assert sum(row.rows for row in found) == users * times * PAIRS_PER_USER
        grown = max(row.peak - row.before for row in found) / 2**20
        figures.append(Figure(f"a worker's memory before it works, {times}x data", found[0].before / 2**20, "MB"))
        figures.append(Figure(f"what it grows by at most, {times}x data", grown, "MB"))
        figures.append(at_most(f"the same / {allowed} MB that the settings allow", grown / allowed, "x", 1.3))
    return figures


def _status(name: str) -> int:
    """A value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    options = arguments(
        __doc__,
        only={"choices": [*TARGETS, "memory"], "help": "one part alone"},
        ray={"metavar": "PYTHON", "help": "an interpreter that has ray[data]"},
    )
    quick, figures = options.quick, []
    if options.ray and shutil.which(options.ray) is None:
        raise SystemExit(f"--ray {options.ray} is no program; name the python of an environment that has ray[data]")
    if not options.ray:
        console.print("Ray Data is left out: name an interpreter that has it with --ray")
    spark = build_session(load_config(overrides=SESSION, environ={}), "bench fm_inference")
    # Users, pairs of predict_batch_udf, repeats.
    sizes = {"demo": (20_000, 10_000, 5), "large": (3_000, 200, 3)}
    if quick:
        sizes = {"demo": (4_000, 3_000, 3), "large": (200, 200, 3)}
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for size, (users, pairs, repeats) in sizes.items():
                if options.only in (None, size):
                    figures += measured_size(spark, size, users, pairs, repeats, folder, options.ray)
            if options.only in (None, "memory"):
                figures += peak_memory(spark, 1_000 if quick else 4_000, folder)
    finally:
        spark.stop()
    report("FM inference", figures, options.json)


if __name__ == "__main__":
    main()
