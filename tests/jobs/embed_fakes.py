"""Five-line fake models for embed_pairs, whose embeddings can be worked out by hand and whose calls can be counted."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from solaris_udf.foundation.alignment import rotated
from solaris_udf.foundation.contract import Description
from solaris_udf.foundation.features import check_names
from solaris_udf.foundation.model import Model
from tests.conftest import AS_OF, hours

HISTORY = {
    "shown": [],
    "clicked": [],
    "requests": 1,
    "scored_rows": 1,
    "shown_rows": 0,
    "clicked_rows": 0,
    "last_event_time": AS_OF - hours(1),
    "checkpoint": True,
}


def description(version="m1", dim=3):
    return Description(
        "fake",
        version,
        dim,
        check_names(["clicked_mask", "item_id"]),
        {"clicked": 4, "shown": 4},
        0,
        ("click",),
        1.0,
        1.0,
        {"user_encoder.pt2": "", "pair_head.pt2": ""},
    )


def fake(log, odd=None, killed_after=None, pair_bytes=0.0, seconds=0.0):
    """Embedding of a pair: clicks of the user, item id mod 7, 1. Writes its calls down in the folder log.

    odd: {item: vector} for items with an embedding of their own; one of another length makes all of its batch so.
    killed_after: once this many pairs were written down, the worker that gets the next ones is killed, one time.
    pair_bytes: what a pair takes, by its own word. seconds: what a batch takes.
    """

    def load():
        with Path(log, f"load-{os.getpid()}").open("a") as file:
            file.write("x")

        def embed(state, index, items):
            if killed_after and len(computed(Path(log))) >= killed_after and not Path(log, "killed").exists():
                Path(log, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with Path(log, f"pairs-{os.getpid()}").open("a") as file:
                file.write(" ".join(map(str, items["item_id"])) + "\n")
            time.sleep(seconds)
            out = np.stack([state[index], items["item_id"] % 7, np.ones(len(index))], axis=1).astype(np.float32)
            for item, vector in (odd or {}).items():
                if len(vector) == 3:
                    out[items["item_id"] == item] = vector
                elif item in items["item_id"]:
                    out = np.tile(np.float32(vector), (len(index), 1))
            return lambda: (out, np.zeros((len(index), 1), np.float32))

        return Model(description(), lambda users: users["clicked_mask"].sum(1), embed, pair_bytes=pair_bytes)

    return load


def turned(load, rotation):
    return load if rotation is None else lambda: rotated(load(), rotation)


def batches(log):
    """The item ids of each batch that fakes with this log got, in no particular order."""
    lines = [line for file in log.glob("pairs-*") for line in file.read_text().splitlines()]
    return [[int(item) for item in line.split()] for line in lines]


def computed(log):
    """The item ids of all pairs that fakes with this log got, sorted."""
    return sorted(item for batch in batches(log) for item in batch)
