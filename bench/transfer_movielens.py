"""MovieLens 100K as bench/transfer.py reads a log: 100,000 ratings, of which 4 and 5 stand for a click."""

import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from transfer_data import Int64, Interactions, key_of

from jobs.common.demo import fetch_movielens
from solaris_udf.foundation.items import ITEM_SCHEMA, ItemTable, write_item_file
from solaris_udf.world.parameters import HOUR

SECOND = 1_000_000
LIKED = 4


def movielens(folder: Path) -> Interactions:
    """The ratings, fetched into folder if they are not there. A user's ratings of one second are one request; a movie's
    first genre is its category. Nothing tells what a viewer was offered and passed over or when a movie came:
    all rows count as shown, and ages are unknown."""
    fetch_movielens(folder)
    ratings = pd.read_csv(folder / "ml-100k.inter", sep="\t").set_axis(["user", "item", "rating", "second"], axis=1)
    movies = pd.read_csv(folder / "ml-100k.item", sep="\t", quoting=3).set_axis(
        ["item", "title", "year", "genres"], axis=1
    )
    ratings["time"] = ratings["second"].astype(np.int64) * SECOND
    ratings["user"] = np.unique(ratings["user"], return_inverse=True)[1]
    ratings = ratings.sort_values(["user", "time", "item"], kind="stable")
    start = int(ratings["time"].min()) // HOUR * HOUR
    user, time = ratings["user"].to_numpy(np.int64), ratings["time"].to_numpy(np.int64)
    scored = np.sort(key_of(user, time - start))
    return Interactions(
        start=start,
        items=_items(movies),
        user=user,
        time=time,
        item_id=ratings["item"].to_numpy(np.int64),
        surface=np.zeros(len(ratings), np.int64),
        clicked=ratings["rating"].to_numpy() >= LIKED,
        converted=None,
        truth=None,
        scored=scored,
        requests=np.unique(scored),
    )


def _items(movies: pd.DataFrame) -> ItemTable:
    genre = movies["genres"].fillna("").str.split().str[0].fillna("unknown")
    columns = {
        "item_id": pa.array(movies["item"].to_numpy(np.int64)),
        "category_id": pa.array(_ids(genre)),
        "advertiser_id": pa.array(np.zeros(len(movies), np.int64)),
        "created_at": pa.nulls(len(movies), ITEM_SCHEMA.field("created_at").type),
        "features": pa.array([[]] * len(movies), ITEM_SCHEMA.field("features").type),
    }
    with tempfile.TemporaryDirectory() as made:
        write_item_file([pa.record_batch(columns)], Path(made) / "items.arrow")
        return ItemTable.open(Path(made) / "items.arrow")  # mapped: it outlives the folder


def _ids(names: pd.Series) -> Int64:
    """The first 63 bits of each name's hash, as an id never depends on what else is there."""
    found = {name: int.from_bytes(sha256(name.encode()).digest()[:8], "big") >> 1 for name in names.unique()}
    return names.map(found).to_numpy(np.int64)
