"""Names and Arrow schemas of a snapshot's files. docs/snapshot-format.md describes them byte by byte."""

import re

import pyarrow as pa

FORMAT = "solaris-snapshot"
FORMAT_MAJOR, FORMAT_MINOR = 1, 1
MANIFEST = "manifest.json"
CURRENT = "CURRENT"
LEASES = ".leases"  # a file ID.READER for each reader that follows, touched while it serves ID
PAIRS, USERS = "pairs", "users"
STAGING_PREFIX = ".staging-"
ROWS_PER_BUCKET = 1.0

NUMPY_TYPES = {pa.int64(): "<i8", pa.uint8(): "u1", pa.float32(): "<f4", pa.uint32(): "<u4"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def is_safe_name(name: str) -> bool:
    """Whether name can be a snapshot's id: one path component, no tricks."""
    return _NAME.fullmatch(name) is not None


def shard_folder(shard: int, shards: int) -> str:
    """`shard-00003-of-00016`."""
    return f"shard-{shard:05d}-of-{shards:05d}"


def data_file(kind: str) -> str:
    return f"{kind}.arrow"


def buckets_file(kind: str) -> str:
    return f"{kind}.buckets.arrow"


def expected_files(shards: int) -> list[str]:
    """Every data file of a snapshot, relative to its folder."""
    return [
        f"{shard_folder(shard, shards)}/{name}"
        for shard in range(shards)
        for kind in (PAIRS, USERS)
        for name in (data_file(kind), buckets_file(kind))
    ]


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


BUCKETS_SCHEMA = pa.schema([_required("offset", pa.uint32())])


def pairs_schema(width: int) -> pa.Schema:
    """pairs.arrow; width is the bytes of one stored vector."""
    return pa.schema(
        [
            _required("user_id", pa.int64()),
            _required("item_id", pa.int64()),
            _required("embedding", pa.binary(width)),
            _required("computed_at", pa.int64()),
        ]
    )


def users_schema(width: int, neighbors: int) -> pa.Schema:
    """users.arrow; neighbors is how many neighbours a row has room for."""
    return pa.schema(
        [
            _required("user_id", pa.int64()),
            _required("embedding", pa.binary(width)),
            _required("computed_at", pa.int64()),
            _required("tier", pa.uint8()),
            _required("source_user", pa.int64()),
            _required("similarity", pa.float32()),
            _required("neighbor_count", pa.uint8()),
            _required("neighbor_ids", pa.list_(_required("item", pa.int64()), neighbors)),
            _required("neighbor_similarities", pa.list_(_required("item", pa.float32()), neighbors)),
        ]
    )


def schema_of(kind: str, width: int, neighbors: int) -> pa.Schema:
    return pairs_schema(width) if kind == PAIRS else users_schema(width, neighbors)
