"""What a page of the report is made of: sections, tables of text cells, tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.common.report_charts import Chart


@dataclass(frozen=True)
class TableView:
    """A table of text cells. numeric: places of the columns that are aligned right. open: shown without a click."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: frozenset[int]
    open: bool = False


@dataclass(frozen=True)
class Section:
    """One section. job fills it when it has no data yet; hint says what else there is to know then."""

    id: str
    title: str
    read: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[TableView] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    job: str = ""
    hint: str = ""

    @property
    def empty(self) -> bool:
        return not (self.charts or self.tables)


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    detail: str


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, open: bool = False
) -> TableView:
    """A table whose first `words` columns are text and the rest numbers."""
    return TableView(caption, tuple(columns), [tuple(row) for row in rows], frozenset(range(words, len(columns))), open)


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None without a whole."""
    return None if part is None or not whole else part / whole
