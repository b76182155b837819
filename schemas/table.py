"""How a table is described: its columns, key, partitions and constraints, in Spark SQL types.

Nothing here imports Spark, so that documentation, tests and readers can use the descriptions anywhere.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """One column: a name, a Spark SQL type, what it means, and whether it may be null."""

    name: str
    type: str
    comment: str
    nullable: bool = False

    @property
    def ddl(self) -> str:
        """As Spark DDL, with NOT NULL and the comment."""
        comment = self.comment.replace("'", "\\'")
        return f"`{self.name}` {self.type}{'' if self.nullable else ' NOT NULL'} COMMENT '{comment}'"


@dataclass(frozen=True)
class Table:
    """A Delta table: what one row is, which columns identify it, and the CHECK constraints written to it."""

    name: str
    comment: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    partition_by: tuple[str, ...] = ("slice",)
    checks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"table {self.name}: repeated columns {sorted(repeated)}")
        missing = [name for name in (*self.key, *self.partition_by) if name not in names]
        if missing:
            raise ValueError(f"table {self.name}: key or partition columns {missing} are not columns")

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def ddl(self) -> str:
        """The columns as a Spark DDL string, with NOT NULL and comments."""
        return ", ".join(column.ddl for column in self.columns)


# Every derived table starts with these three.
SLICE_COLUMNS = (
    Column("slice", "STRING", "The run's as_of as yyyyMMddTHHmmssZ; a run replaces exactly its own slice"),
    Column(
        "as_of", "TIMESTAMP", "Logical time of the run that wrote the row (UTC); it read only what was known before"
    ),
    Column("run_id", "STRING", "The run in job_runs that wrote the row"),
)

# Every table that stores vectors carries these.
EMBEDDING_COLUMNS = (
    Column(
        "embedding",
        "BINARY",
        "The vector, encoded as codec says; unpack_embedding(embedding, codec) gives array<float>",
    ),
    Column(
        "codec", "STRING", "float16: d little-endian halves; int8: a little-endian float32 scale, then d signed bytes"
    ),
    Column("model_version", "STRING", "Hash of the foundation model and its projection; versions never mix"),
)

CODEC_CHECK = {"known_codec": "codec IN ('float16', 'int8')"}
