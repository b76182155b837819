"""embed_pairs with the fake model in a process of its own, which can be killed.

    python -m tests.jobs.embed_process ROOT LOG CHUNKS PAIRS [override...]

The driver is killed once CHUNKS chunks are done, a worker once PAIRS pairs were given to the model; 0: never.
"""

import os
import signal
import sys
from pathlib import Path

import jobs.embed_pairs as job
from jobs.common.config import load_config
from jobs.common.runs import Run
from jobs.common.session import build_session
from solaris_udf.foundation.udf import embed_udf_of
from tests.conftest import AS_OF
from tests.jobs.embed_fakes import description, fake


def main(root, log, chunks, pairs, *overrides):
    size = ["spark.master=local[1]", "spark.shuffle_partitions=1", "spark.driver_memory=1g"]
    config = load_config(overrides=[f"storage.root={root}", *size, *overrides], environ={})
    job._model = lambda _: (Path("fake"), description())
    job.embed_udf = lambda folder, items, *, limits, **_: embed_udf_of(
        fake(log, killed_after=int(pairs)), items, limits=limits
    )
    next_chunk, done = job._Staging.next_chunk, []

    def killed_chunk(self):
        if len(done) == int(chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(1)
        return next_chunk(self)

    if int(chunks):
        job._Staging.next_chunk = killed_chunk
    run = Run("embed_pairs", build_session(config, "killed"), config, AS_OF, "again")
    job.run(run, config.get(job.Settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
