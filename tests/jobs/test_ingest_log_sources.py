"""The same log from other sources, the example of the documentation, and runs that die half-way."""

import re
from datetime import datetime
from pathlib import Path

import pytest

from jobs.common.runs import Run
from jobs.ingest_log import run as ingest
from tests.conftest import AS_OF, hours

SHOP = """
replay = true
[ids]
user = "string"
item = "string"
[time]
unit = "iso"
[log]
format = "csv"
files = "log.csv"
[log.columns]
request_id = "request"
user_id = "user"
item_id = "item"
event_time = "time"
clicked = "clicked"
[label_events]
format = "csv"
files = "labels.csv"
[label_events.columns]
request_id = "request"
item_id = "item"
label = "what"
occurred_at = "time"
value = "1"
"""
DOCS = Path(__file__).parents[2] / "docs" / "bring-your-own-log.md"


def test_the_example_of_the_documentation_gives_what_it_says(tmp_path, make_run, tables):
    blocks = dict(re.findall(r"```(\w*)\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[:2])
    log, mapping = tmp_path / "log.csv", tmp_path / "shop.toml"
    log.write_text(blocks[""], encoding="utf-8")
    mapping.write_text(blocks["toml"], encoding="utf-8")
    run, settings = make_run("ingest_log", AS_OF, f"log.dataset={mapping}", f"log.path={log}")
    report = ingest(run, settings)
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (3, 3, 0)
    rows = {(row.request_id, row.item_id): row for row in tables.read("ranking_log").collect()}
    assert rows.keys() == {("a17", 9_007_199_254_740_993), ("a17", 77), ("a18", 77)}
    first = rows["a17", 9_007_199_254_740_993]
    assert (first.user_id, first.event_time, first.surface) == (42, datetime(2026, 1, 2, 4), "home")
    assert (first.position, first.shown, first.clicked, first.labels) == (0, True, True, {"dwell_seconds": 12.5})
    assert rows["a18", 77].event_time == datetime(2026, 1, 2, 4, 30) and not rows["a18", 77].shown


def test_a_delta_table_as_the_source(tmp_path, spark, make_run, tables):
    """Two commits, the second of which overwrites the first: only what the table holds now counts."""
    source = f"{tmp_path}/log"
    schema = "who BIGINT, what BIGINT, at TIMESTAMP, liked BOOLEAN"
    old = [(7, 7, AS_OF - hours(9), True)]
    new = [
        (2**62, -5, AS_OF - hours(2), True),
        (1, -5, AS_OF - hours(1), False),
        (1, 6, AS_OF, True),
        (1, None, AS_OF - hours(1), True),
    ]
    for rows in (old, new):
        spark.createDataFrame(rows, schema).write.format("delta").mode("overwrite").save(source)
    mapping = tmp_path / "delta.toml"
    mapping.write_text(
        'replay = true\n[time]\nunit = "iso"\n[log]\nformat = "delta"\n'
        '[log.columns]\nuser_id = "who"\nitem_id = "what"\nevent_time = "at"\nclicked = "liked"\n',
        encoding="utf-8",
    )
    run, settings = make_run("ingest_log", AS_OF, f"log.dataset={mapping}", f"log.path={source}")
    assert ingest(run, settings).rows_out == 2
    rows = tables.read("ranking_log").orderBy("event_time").collect()
    assert [(row.user_id, row.item_id, row.clicked) for row in rows] == [(2**62, -5, True), (1, -5, False)]
    assert [row.reason for row in tables.read("rejected_rows").collect()] == ["item_id is missing"]


def test_a_run_that_dies_between_two_writes_is_made_whole_by_the_next(tmp_path, make_run, tables, root, monkeypatch):
    """However many tables were written before: after a second run all of them are what an undisturbed run leaves."""
    log, labels, mapping = tmp_path / "log.csv", tmp_path / "labels.csv", tmp_path / "shop.toml"
    log.write_text(
        "request,user,item,time,clicked\n"
        "a,ann,hat,2026-01-02T10:00:00Z,1\n"
        "a,ann,tie,2026-01-02T10:00:00Z,0\n"
        "b,bob,hat,2026-01-02T11:00:00Z,perhaps\n",
        encoding="utf-8",
    )
    labels.write_text("request,item,what,time\na,hat,sale,2026-01-02T12:00:00Z\n", encoding="utf-8")
    mapping.write_text(
        SHOP,
        encoding="utf-8",
    )
    written = ["ranking_log", "items", "label_events", "id_map", "rejected_rows"]
    real, count = Run.write, 0

    def write(self, frame, table):
        nonlocal count
        if count == 0:
            raise KeyboardInterrupt
        count -= 1
        return real(self, frame, table)

    def contents(tables):
        return {
            name: sorted(str(row) for row in tables.read(name).drop("run_id").collect()) if tables.exists(name) else []
            for name in written
        }

    def attempt(dies_at=None):
        nonlocal count
        count = 99 if dies_at is None else dies_at
        run, settings = make_run(
            "ingest_log", AS_OF, f"log.dataset={mapping}", f"log.path={tmp_path}", "quality.max_reject_rate=1"
        )
        with monkeypatch.context() as patch:
            patch.setattr(Run, "write", write)
            if dies_at is None:
                ingest(run, settings)
            else:
                with pytest.raises(KeyboardInterrupt):
                    ingest(run, settings)

    states = []
    for dies_at in range(4):
        attempt(dies_at)
        states.append(contents(tables))
        assert not states[-1]["ranking_log"], "the log's slice says that the run is complete, so it comes last"
        # Each attempt goes further than the one before and finds what that one left.
    attempt()
    whole = contents(tables)
    assert {name: len(rows) for name, rows in whole.items()} == {
        "ranking_log": 2,
        "items": 2,
        "label_events": 1,
        "id_map": 3,
        "rejected_rows": 1,
    }
    attempt()
    assert contents(tables) == whole
    for state in states:
        for name, rows in state.items():
            assert not rows or rows == whole[name], name
