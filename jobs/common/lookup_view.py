"""`solaris lookup`: what the live snapshot answers, in the terminal. Needs no Spark."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jobs.common.clock import from_micros, micros, parse_as_of
from jobs.common.config import Config
from jobs.common.datasets import load_dataset
from jobs.common.errors import UserError
from solaris_udf.snapshot import Lookup, Snapshot, SnapshotError, text_ids
from solaris_udf.snapshot.layout import PAIRS, USERS
from solaris_udf.snapshot.mapped import MappedTable

# Enough to meet every tier that a snapshot has: each tier needs one user and one item among them.
SAMPLE_USERS, SAMPLE_ITEMS = 400, 100


def open_live(config: Config) -> Snapshot:
    """The live snapshot. Raises UserError if there is none or it is damaged."""
    try:
        return Snapshot.open(config.path("snapshots"), engine="numpy")
    except SnapshotError as error:
        raise UserError(f"{error} (solaris run exports one; --config or --set storage.root says where)") from None


def given_time(at: str | None) -> datetime | None:
    """`now`, or a time with a zone; None if none was given. Raises UserError for anything else."""
    if at is None:
        return None
    return datetime.now(UTC) if at == "now" else parse_as_of(at, "--at")


def live_from(config: Config, snapshot: Snapshot) -> datetime:
    """The moment when the snapshot went live."""
    return from_micros(snapshot.manifest.as_of_micros) + timedelta(minutes=config.serving.publish_delay_minutes)


def as_ids(config: Config, kind: Literal["user", "item"], texts: Sequence[str], *, hashed: bool) -> list[int]:
    """The 64-bit ids of what someone typed: integers as they are; text hashed, where the dataset's ids are text.

    hashed: they are what the tables hold, whatever the dataset's ids are. Raises UserError for what is no id.
    """
    if not hashed and getattr(load_dataset(config.log.dataset).ids, kind) == "string":
        return [int(value) for value in text_ids(texts)]
    ids = []
    for text in texts:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or not -(2**63) <= int(text) < 2**63:
            raise UserError(
                f"{kind} {text!r} is no 64-bit integer, as the ids of dataset {config.log.dataset} are; if yours are "
                "text, name your mapping: --set log.dataset=FILE.toml"
            )
        ids.append(int(text))
    return ids


def show_lookup(
    config: Config, user: str, items: Sequence[str], at: str | None, values: int, console: Console, *, hashed: bool
) -> None:
    """One user's items."""
    asked = given_time(at)
    user_ids = as_ids(config, "user", [user], hashed=hashed) * len(items)
    item_ids = as_ids(config, "item", items, hashed=hashed)
    snapshot = open_live(config)
    moment = asked or live_from(config, snapshot)
    answer = snapshot.lookup(user_ids, item_ids, micros(moment))
    _print(snapshot, moment, [user] * len(items), items, answer, values, console)


def show_examples(config: Config, at: str | None, values: int, console: Console) -> None:
    """One pair of each tier that the snapshot can answer from, found among a sample of its users and items."""
    asked = given_time(at)
    snapshot = open_live(config)
    moment = asked or live_from(config, snapshot)
    users, items = _sample(snapshot)
    answer = snapshot.lookup(users, items, micros(moment), user_vectors=False)
    places = [int(np.flatnonzero(answer.tier == tier)[0]) for tier in np.unique(answer.tier)]
    places.sort(key=lambda place: (answer.tier[place] == 0, answer.tier[place]))
    chosen = snapshot.lookup(users[places], items[places], micros(moment))
    _print(snapshot, moment, users[places].tolist(), items[places].tolist(), chosen, values, console)


def _sample(snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """Users x items of the first shards, the pairs among them, and a user that nobody knows."""
    pairs = [MappedTable.open(snapshot.folder, snapshot.manifest, PAIRS, shard) for shard in snapshot.shards[:4]]
    users = [MappedTable.open(snapshot.folder, snapshot.manifest, USERS, shard) for shard in snapshot.shards[:4]]
    pair_users = np.concatenate([table.columns["user_id"][:SAMPLE_USERS] for table in pairs])
    pair_items = np.concatenate([table.columns["item_id"][:SAMPLE_USERS] for table in pairs])
    by_tier = [
        table.columns["user_id"][np.flatnonzero(table.columns["tier"] == tier)[: SAMPLE_USERS // 4]]
        for table in users
        for tier in np.unique(table.columns["tier"])
    ]
    some_users = np.concatenate([*by_tier, pair_users[:0]])
    some_items = np.unique(pair_items)[:SAMPLE_ITEMS] if len(pair_items) else np.zeros(1, np.int64)
    unknown = np.iinfo(np.int64).min + 1
    return (
        np.concatenate([pair_users, np.repeat(some_users, len(some_items)), [unknown]]),
        np.concatenate([pair_items, np.tile(some_items, len(some_users)), some_items[:1]]),
    )


def _print(
    snapshot: Snapshot,
    moment: datetime,
    users: Sequence[int | str],
    items: Sequence[int | str],
    answer: Lookup,
    values: int,
    console: Console,
) -> None:
    console.print(f"snapshot {snapshot.snapshot_id}, asked at {moment:%Y-%m-%d %H:%M} UTC", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("user", "item"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tier")
    for name in ("age", "cosine", f"vector, {min(values, snapshot.dim)}/{snapshot.dim}"):
        table.add_column(name, justify="right")
    for place, tier in enumerate(answer.tier_names):
        age = "-" if answer.age_seconds[place] < 0 else str(timedelta(seconds=int(answer.age_seconds[place])))
        vector = "-" if tier == "none" else " ".join(f"{value:+.3f}" for value in answer.embedding[place, :values])
        table.add_row(str(users[place]), str(items[place]), tier, age, f"{answer.similarity[place]:.3f}", vector)
    console.print(table)
