"""`solaris lookup`: what the live snapshot answers, in the terminal. Needs no Spark."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jobs.common.clock import from_micros, micros, parse_as_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from solaris_udf.snapshot import Lookup, Snapshot, SnapshotError
from solaris_udf.snapshot.layout import PAIRS, USERS
from solaris_udf.snapshot.mapped import MappedTable

# Enough to meet every tier that a snapshot has: each tier needs one user and one item among them.
SAMPLE_USERS, SAMPLE_ITEMS = 400, 100


def open_live(config: Config) -> Snapshot:
    """The live snapshot. Raises UserError if there is none or it is damaged."""
    try:
        return Snapshot.open(config.path("snapshots"), engine="numpy")
    except SnapshotError as error:
        raise UserError(f"{error} (solaris run exports one)") from None


def request_time(config: Config, snapshot: Snapshot, at: str | None) -> datetime:
    """`now`, a time with a zone, or by default the moment when the snapshot went live."""
    if at == "now":
        return datetime.now(UTC)
    if at is not None:
        return parse_as_of(at)
    return from_micros(snapshot.manifest.as_of_micros) + timedelta(minutes=config.serving.publish_delay_minutes)


def show_lookup(config: Config, user: int, items: Sequence[int], at: str | None, values: int, console: Console) -> None:
    """One user's items."""
    snapshot = open_live(config)
    moment = request_time(config, snapshot, at)
    for value in (user, *items):
        if not -(2**63) <= value < 2**63:
            raise UserError(f"{value} is no 64-bit integer, as ids are")
    answer = snapshot.lookup(np.full(len(items), user), list(items), micros(moment))
    _print(snapshot, moment, [user] * len(items), items, answer, values, console)


def show_examples(config: Config, at: str | None, values: int, console: Console) -> None:
    """One pair of each tier that the snapshot can answer from, found among a sample of its users and items."""
    snapshot = open_live(config)
    moment = request_time(config, snapshot, at)
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
    users: Sequence[int],
    items: Sequence[int],
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
