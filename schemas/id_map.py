"""String ids and the 64-bit ids they were hashed to."""

from schemas.table import SLICE_COLUMNS, Column, Table

ID_MAP = Table(
    name="id_map",
    comment="One row per string id first seen by an ingest run. Ids that are integers already have no row here.",
    key=("kind", "id"),
    columns=(
        *SLICE_COLUMNS,
        Column("kind", "STRING", "user, item, category or advertiser"),
        Column("id", "BIGINT", "xxhash64 of the original string"),
        Column("original", "STRING", "The id as it stands in the source"),
    ),
)
