"""The lookup snapshot: what online rankers read. Needs numpy and pyarrow only.

from solaris_udf.snapshot import Snapshot
answer = Snapshot.open("snapshots").lookup(user_ids, item_ids)
"""

from solaris_udf.snapshot.counters import TierCounters
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.features import feature_block, feature_names
from solaris_udf.snapshot.follower import SnapshotFollower
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.snapshot.miss_log import MissLog
from solaris_udf.snapshot.reader import Snapshot
from solaris_udf.snapshot.text_ids import text_ids

__all__ = [
    "Lookup",
    "MissLog",
    "Snapshot",
    "SnapshotError",
    "SnapshotFollower",
    "TierCounters",
    "feature_block",
    "feature_names",
    "text_ids",
]
