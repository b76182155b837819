"""A small online ranker that follows the live snapshot: what a serving host does with SOLARIS, in one file.

    python examples/online_ranker.py SNAPSHOTS_FOLDER [--requests 5] [--at 2026-01-03T06:30:00Z]

It needs numpy, pyarrow and solaris_udf only. Each request asks for one user's candidates, turns the answers into the
dense block that the model takes (two slots: the pair's vector, and the user's), scores it, and prints the ranking. A
background thread follows CURRENT, so a snapshot that is exported meanwhile is served from the next request on.
"""

import argparse
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from solaris_udf.snapshot import SnapshotError, SnapshotFollower, feature_block, feature_names

CANDIDATES = 15  # a retrieval stage would hand these over


def ids_to_ask_for(follower: SnapshotFollower, seed: int) -> tuple[int, npt.NDArray[np.int64]]:
    """A user and candidate items, taken from the snapshot itself so that the example has something to find."""
    rng = np.random.default_rng(seed)
    table = max(follower.snapshot.pairs.values(), key=lambda one: one.rows)
    if not table.rows:
        return 1, np.arange(CANDIDATES, dtype=np.int64)
    rows = rng.integers(0, table.rows, CANDIDATES)
    return int(table.columns["user_id"][rows[0]]), np.asarray(table.columns["item_id"][rows])


def model(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Stands for the online model: any function of the feature block, float32 [n, F] to scores [n]."""
    weights = np.random.default_rng(0).standard_normal(features.shape[1]).astype(np.float32)
    scores: npt.NDArray[np.float32] = 1 / (1 + np.exp(-(features @ weights) / np.sqrt(features.shape[1])))
    return scores


def serve(root: Path, requests: int, at: datetime | None) -> None:
    """Answers some requests and prints each ranking, then what the tiers answered."""
    with SnapshotFollower(root, poll_seconds=1.0) as follower:
        names = feature_names(follower.snapshot.dim)
        print(f"serving {follower.snapshot.snapshot_id}: {len(names)} features from {names[0]} to {names[-1]}")
        for request in range(requests):
            user, items = ids_to_ask_for(follower, request)
            answer = follower.lookup(np.full(len(items), user, np.int64), items, at)
            scores = model(feature_block(answer))
            best = np.lexsort((items, -scores))[:3]
            shown = ", ".join(f"{items[place]} ({scores[place]:.3f}, {answer.tier_names[place]})" for place in best)
            print(f"user {user}: {shown}")
        print("answered by tier:", {tier: count for tier, count in follower.counters.read().items() if count})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="SNAPSHOTS_FOLDER")
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--at", type=datetime.fromisoformat, help="time of the requests, with a zone (default: now)")
    arguments = parser.parse_args()
    try:
        serve(arguments.root, arguments.requests, arguments.at)
    except SnapshotError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
