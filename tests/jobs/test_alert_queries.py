"""The queries of docs/alerting.md, run as they stand."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.conftest import AS_OF, hours

PAGE = Path(__file__).parents[2] / "docs" / "alerting.md"
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
pytestmark = pytest.mark.spark


@pytest.fixture
def ask(spark, tables):
    def run(number):
        query = QUERIES[number]
        for name in ("job_runs", "rejected_rows"):
            query = query.replace(f"FROM {name}", f"FROM delta.`{tables.path(name)}`")
        return [tuple(row) for row in spark.sql(query).collect()]

    return run


def test_each_query_says_what_the_page_says(ask, fill):
    now = datetime.now(UTC).replace(microsecond=0)

    def record(job, days_ago, seconds, status="succeeded", error=None):
        at, as_of = now - timedelta(days=days_ago), AS_OF - timedelta(days=days_ago)
        name = as_of.strftime("%Y%m%dT%H%M%SZ")
        return {
            "run_id": f"{job}-{days_ago}-{status}",
            "job": job,
            "slice": name,
            "as_of": as_of,
            "status": status,
            "config_hash": "0" * 16,
            "rows_in": 1,
            "rows_out": 1,
            "rows_rejected": 0,
            "started_at": at,
            "seconds": seconds,
            "error": error,
            "metrics": {},
        }

    runs = [record("embed_pairs", day, 10.0) for day in (1, 2, 3)] + [record("embed_pairs", 0, 30.0)]
    runs += [record("export_snapshot", day, 10.0) for day in (0.25, 2)]
    runs += [record("ingest_log", 1, 2.0, "failed", "UserError: no"), record("ingest_log", 9, 2.0, "failed", "old")]
    fill("job_runs", runs)
    rejected = [{"source": "ingest_log", "reason": reason, "row": "{}"} for reason in ("future", "future", "no item")]
    fill("rejected_rows", rejected, slice="20260103T000000Z", source="ingest_log")

    assert len(QUERIES) == 4
    assert ask(0) == [
        ((now - timedelta(days=1)).replace(tzinfo=None), "ingest_log", "20260102T000000Z", "UserError: no")
    ]
    # The median of 10, 10, 10 and 30 is 10; export_snapshot's latest is as usual.
    assert ask(1) == [("embed_pairs", 10.0, 30.0)]
    assert ask(2) == [
        ("20260103T000000Z", "ingest_log", "future", 2),
        ("20260103T000000Z", "ingest_log", "no item", 1),
    ]
    ((age,),) = ask(3)
    expected = (datetime.now(UTC) - (AS_OF - hours(6))).total_seconds() / 3600
    assert age == pytest.approx(float(expected), abs=0.1)
