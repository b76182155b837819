"""The report's page: the figures of filled tables stand on it, and empty tables still make one."""

import re
from datetime import timedelta
from html.parser import HTMLParser

import pytest

from jobs.common import report_format as fmt
from jobs.common.clock import slice_of
from jobs.common.report import render, write_report
from jobs.common.report_budget import hindsight, rows_at
from jobs.common.report_data import ReportData, read_report_data
from jobs.common.report_sections import sections, tiles
from jobs.common.tables import Tables, spark_schema
from schemas import TABLES
from solaris_udf.codec import encode
from tests.conftest import AS_OF, DEFAULTS, hours, log_row

SECTIONS = [
    "coverage",
    "budget",
    "cost",
    "ledger",
    "uplift",
    "coverage-gain",
    "ab",
    "sweeps",
    "freshness",
    "neighbors",
    "snapshots",
    "jobs",
    "rejected",
]
PLACES = ["cluster", "first component", "second component"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what the tests ask for: ids, sections' text, tables' cells, references."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], []
        self.section, self.text, self.tables, self.plots = None, {}, {}, {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.references += [
            value for name, value in attrs.items() if name in ("src", "href", "xlink:href", "srcset", "action")
        ]
        if tag == "section":
            self.section = attrs["id"]
        if tag == "svg":
            self.plots.setdefault(self.section, []).append(attrs["aria-label"])
        if tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.tables[self.section][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "section":
            self.section = None

    def handle_data(self, data):
        self.text[self.section] = self.text.get(self.section, "") + data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.section][-1][-1] += data


def audit(
    start, tier, rows, share, *, age=None, p90=None, population="scored", snapshot="s1", surface="all", segment="all"
):
    return {
        "window_start": start,
        "window_end": start + hours(6),
        "snapshot_id": snapshot,
        "surface": surface,
        "population": population,
        "segment": segment,
        "tier": tier,
        "rows": rows,
        "share": share,
        "mean_age_seconds": age,
        "p90_age_seconds": p90,
    }


def evaluation(
    feature_set, metric, value, low=None, high=None, *, seed=-1, sweep="main", setting="", model="vm", note=None
):
    return {
        "evaluation_id": "e1",
        "dataset": "world",
        "sweep": sweep,
        "setting": setting,
        "model": model,
        "feature_set": feature_set,
        "seed": seed,
        "metric": metric,
        "value": value,
        "ci_low": low,
        "ci_high": high,
        "rows": 5000,
        "note": note,
    }


def job_run(job, at, seconds, *, status="succeeded", error=None, metrics=None, rows=(0, 0, 0)):
    return {
        "run_id": f"{job}-{at.timestamp()}",
        "job": job,
        "slice": slice_of(at),
        "as_of": at,
        "status": status,
        "config_hash": "c",
        "rows_in": rows[0],
        "rows_out": rows[1],
        "rows_rejected": rows[2],
        "started_at": at,
        "seconds": seconds,
        "error": error,
        "metrics": metrics or {},
    }


class InMemory(Tables):
    """Tables whose rows were never written: the report's queries are the same on them, and far sooner ready."""

    def __init__(self, spark):
        super().__init__(spark, "nowhere")
        self.rows = {}

    def fill(self, name, rows, as_of=AS_OF):
        at = slice_of(as_of)
        base = {"slice": at, "build": at, "as_of": as_of, "run_id": "test", **DEFAULTS.get(name, {})}
        columns = TABLES[name].column_names
        self.rows.setdefault(name, []).extend(tuple({**base, **row}.get(column) for column in columns) for row in rows)

    def read(self, name):
        return self.spark.createDataFrame(self.rows.get(name, []), spark_schema(TABLES[name]))


@pytest.fixture
def filled(spark):
    """Two audited windows, the first audited twice; figures are worked out by hand in the test."""
    tables = InMemory(spark)
    fill = tables.fill
    first, second = AS_OF - hours(12), AS_OF - hours(6)
    fill("coverage_audit", [audit(first, "pair", 999, 1.0)], AS_OF - hours(6))
    fill(
        "coverage_audit",
        [
            audit(first, "pair", 100, 0.5, age=3600.0, p90=7200.0),
            audit(first, "none", 100, 0.5),
            # The second window met two snapshots: 30 + 270 pair rows of 1,000.
            audit(second, "pair", 30, 1.0, age=36000.0, p90=36000.0, snapshot="s0"),
            audit(second, "pair", 270, 0.28, age=3600.0, p90=18000.0),
            audit(second, "user_mean", 500, 0.5, age=7200.0, p90=7200.0),
            audit(second, "none", 200, 0.2),
            audit(second, "pair", 45, 0.75, age=60.0, p90=60.0, population="shown"),
            audit(second, "none", 15, 0.25, population="shown"),
            audit(second, "pair", 77, 1.0, surface="reels"),
            audit(second, "none", 11, 1.0, surface="all", segment="user:<new> & $hot$"),
        ],
        AS_OF,
    )
    histogram = [
        {"bucket": 0.9, "action": "compute", "pairs": 100, "expected_rows": 95.0, "cost": 2e9},
        {"bucket": 0.5, "action": "reuse", "pairs": 50, "expected_rows": 27.5, "cost": 0.0},
        {"bucket": 0.1, "action": "skip", "pairs": 850, "expected_rows": 102.5, "cost": 17e9},
    ]
    fill("score_histogram", histogram, second)
    fill(
        "precompute_ledger",
        [
            {
                "predicted_at": second,
                "predicted": 150,
                "computed": 98,
                "rejected": 2,
                "reused": 50,
                "hit": 70,
                "wasted": 28,
                "scored_rows": 1000,
                "covered_rows": 125,
                "expected_rows": 122.5,
                "cost": 2e9,
                "seconds": 4.0,
            },
        ],
        AS_OF,
    )
    # The 1,000 rows of the second window: a pair of 200, a hundred of 3, 500 of one. Rows of others are not its.
    moments = [*(1,) * 200, *(pair for pair in range(2, 102) for _ in range(3)), *range(102, 602)]
    fill("ranking_log", [log_row(user, 7, second) for user in moments] + [log_row(1, 7, first), log_row(1, 8, AS_OF)])
    fill(
        "vm_evaluations",
        [
            evaluation("base", "ne", 0.9275, 0.92, 0.935),
            evaluation("embeddings", "ne", 0.9051, 0.9, 0.911),
            evaluation("embeddings", "rll", -2.42, -3.1, -1.8),
            evaluation("embeddings", "transfer_ratio", 0.563, 0.48, 0.65),
            evaluation("shuffled", "transfer_ratio", None, note="the interval of FM - VM contains 0"),
            evaluation("distillation", "rll", -0.1, seed=0),
            evaluation("distillation", "rll", -0.3, seed=1),
            *(
                evaluation(
                    "embeddings", "rll", -share, -share - 0.1, -share + 0.1, sweep="coverage", setting=str(share)
                )
                for share in (0.25, 0.5, 1.0)
            ),
            evaluation("", "revenue", 1234.5, 1200.0, 1300.0, sweep="ab", model="treatment"),
            evaluation("", "revenue_lift", 5.5, 5.0, 6.1, sweep="ab", model="treatment"),
            evaluation("embeddings", "ne", 0.91, sweep="ttl", setting="6"),
            evaluation("embeddings", "rll_added", -0.4, -0.5, -0.3, sweep="tier", setting="pair + user_mean"),
            evaluation("embeddings", "rll_added", -1.5, -1.9, -1.1, sweep="tier_rows", setting="user_mean"),
            evaluation("embeddings", "rll_added", -3.5, -4.5, -2.5, sweep="tier_rows", setting="pair"),
            evaluation("embeddings", "rll", -2.0, -2.5, -1.5, sweep="fm_age", setting="42"),
        ],
    )
    # An earlier evaluation is not shown, but for the younger model that it measured.
    earlier = [
        evaluation("embeddings", "rll", -2.4, -2.9, -1.9, sweep="fm_age", setting="36"),
        evaluation("base", "ne", 0.8888),
    ]
    fill("vm_evaluations", [{**row, "evaluation_id": "e0"} for row in earlier], second)
    fill(
        "user_neighbors",
        [
            {"user_id": 1, "neighbors": [(2, 0.97), (3, 0.2)], "embedding_at": AS_OF},
            {"user_id": 2, "neighbors": [(1, 0.97)], "embedding_at": AS_OF, "cluster_id": 1},
            {"user_id": 3, "neighbors": [(1, 1.0)], "embedding_at": AS_OF},
            {"user_id": 4, "neighbors": [], "embedding_at": AS_OF},
        ],
    )
    vectors = {1: [1, 0, 0], 2: [0, 1, 0], 3: [1, 0.1, 0], 4: [0, 0, 0]}
    fill(
        "user_embeddings",
        [
            {"user_id": user, "embedding": encode([vector])[0].as_py(), "newest_at": AS_OF}
            for user, vector in vectors.items()
        ],
    )
    fill(
        "snapshots",
        [
            {
                "snapshot_id": "snap-1",
                "model_version": "m1",
                "live_from": AS_OF,
                "status": "live",
                "pairs": 41234,
                "users_own": 812,
                "users_neighbor": 188,
                "bytes": 5 * 2**20,
                "manifest_sha256": "x",
            }
        ],
    )
    fill(
        "job_runs",
        [
            job_run("find_neighbors", AS_OF, 2.0, metrics={"recall": 0.987, "n": 4.0, "cells": 2.0}, rows=(4, 4, 0)),
            job_run("embed_pairs", AS_OF - hours(6), 3.0, rows=(100, 98, 2)),
            job_run("embed_pairs", AS_OF, 5.0, rows=(200, 190, 10)),
            job_run("embed_pairs", AS_OF + hours(6), 9.0, status="failed", error="RunFailed: <b>too many</b>"),
        ],
    )
    fill(
        "rejected_rows",
        [{"source": "ingest_log", "reason": reason, "row": "{}"} for reason in ("future", "future", "null $id$")],
    )
    return tables


def test_every_figure_of_the_tables_stands_on_the_page(make_config, filled):
    data = read_report_data(filled, slices=200)
    text = render(sections(data), tiles(data), make_config(), slices=200)
    page = Page(text)
    cells = {name: {cell for row in rows for cell in row} for name, rows in page.tables.items()}

    # 800 of 1,000 rows covered; only the later audit of the first window counts; 11 rows of a segment don't.
    assert ["2026-01-02 18:00", "1,000", "80.0%", "30.0%", "50.0%", "20.0%"] in page.tables["coverage"]
    assert ["2026-01-02 12:00", "200", "50.0%", "50.0%", "0.0%", "50.0%"] in page.tables["coverage"]
    assert ["2026-01-02 18:00", "60", "75.0%", "75.0%", "25.0%"] in page.tables["coverage"]
    assert ["scored", "all", "user:<new> & $hot$", "11", "0", "0.0%"] in page.tables["coverage"]
    assert ["scored", "reels", "all", "77", "77", "100.0%"] in page.tables["coverage"]
    # (30 x 10 h + 270 x 1 h) / 300 = 1.9 h; p90 (30 x 10 + 270 x 5) / 300 = 5.5 h
    assert ["2026-01-02 18:00", "1.9 h", "5.5 h", "2.0 h", "2.0 h"] in page.tables["freshness"]
    # With hindsight 150 pairs cover 200 + 100 x 3 + 49 x 1 rows.
    fact = ["20260102T180000Z", "1,000", "150", "15.0%", "122.5", "125", "549", "22.8%", "1,000", "2 GFLOP"]
    assert fact in page.tables["budget"]
    expected = [["100", "10.0%", "95"], ["150", "15.0%", "122.5"], ["1,000", "100.0%", "225"]]
    possible = [["1", "0.1%", "200"], ["101", "10.1%", "500"], ["601", "60.1%", "1,000"]]
    assert [row for row in page.tables["budget"] if row[0][0].isdigit() and len(row) == 3] == expected + possible
    assert ["2026-01-02 18:00", "2 GFLOP", "4.0 s", "125", "16 GFLOP", "32.0 s"] in page.tables["cost"]
    assert ["2026-01-02 18:00", "150", "98", "70", "28", "71.4%", "50", "2", "122.5", "125", "1,000"] in page.tables[
        "ledger"
    ]
    assert [
        "vm: embeddings",
        "0.9051 [0.9000, 0.9110]",
        "−2.42% [−3.10, −1.80]",
        "0.563 [0.480, 0.650]",
        "5,000",
    ] in page.tables["uplift"]
    assert ["vm: distillation", "–", "−0.2%", "–", "5,000"] in page.tables["uplift"]
    assert "world, transfer ratio of vm: shuffled: the interval of FM - VM contains 0" in page.text["uplift"]
    assert [row[0] for row in page.tables["coverage-gain"]] == ["coverage", "0.25", "0.5", "1.0"]
    assert {"1,234 [1,200, 1,300]", "5.50% [5.00, 6.10]"} <= cells["ab"]
    assert ["6", "vm: embeddings", "0.91", "5,000"] in page.tables["sweeps"]
    assert ["user_mean", "vm: embeddings", "−1.50% [−1.90, −1.10]", "5,000"] in page.tables["sweeps"]
    ages = [row for row in page.tables["sweeps"] if row[0] in ("36", "42")]
    assert [row[2] for row in ages] == ["−2.40% [−2.90, −1.90]", "−2.00% [−2.50, −1.50]"]
    assert "0.8888" not in text
    assert ["pair + user_mean", "vm: embeddings", "−0.40% [−0.50, −0.30]", "5,000"] in page.tables["sweeps"]
    assert ["20260103T000000Z", "4", "2", "1", "1"] in page.tables["neighbors"]
    assert ["20260103T000000Z", "4", "2.0 s", "2", "4", "0.987"] in page.tables["neighbors"]
    assert ["0.95", "1", "3"] in page.tables["neighbors"]
    # Of unit vectors (1, 0, 0), (0, 1, 0), (1, 0.1, 0) / 1.005 and 0, whose mean is (0.4988, 0.2749, 0).
    places = page.tables["neighbors"][page.tables["neighbors"].index(PLACES) + 1 :]
    assert [row[0] for row in places] == ["0", "0", "0", "1"]
    across = sum(float(row[axis].replace("−", "-")) ** 2 for row in places for axis in (1, 2))
    assert across == pytest.approx(3 - 4 * (0.49876**2 + 0.27488**2), abs=2e-3)  # all of the variance
    assert "Places on the map, all 4 users" in page.text["neighbors"]
    assert "cluster 0" in page.text["neighbors"] and "100% of the variance" in text
    assert {"snap-1", "41,234", "812", "188", "5.0 MiB"} <= cells["snapshots"]
    assert ["embed_pairs", "3", "1", "4.0 s", "17.0 s", "300", "288", "12", "200", "190"] in page.tables["jobs"]
    assert "RunFailed: <b>too many</b>" in cells["jobs"]
    assert ["ingest_log", "future", "2", "1", "20260103T000000Z"] in page.tables["rejected"]
    for figure in ("80.0%", "75.0%", "71.4%", "16 GFLOP", "41,234 pairs", "0.563", "95% interval [0.480, 0.650]"):
        assert figure in page.text[None], figure

    # Each plot is there in a wide and a narrow form, and its legend names its layers.
    assert {name: len(plots) for name, plots in page.plots.items()} == {
        "coverage": 4,
        "budget": 2,
        "cost": 2,
        "ledger": 2,
        "uplift": 4,
        "coverage-gain": 2,
        "ab": 2,
        "sweeps": 2,
        "freshness": 2,
        "neighbors": 6,
        "snapshots": 4,
        "jobs": 2,
        "rejected": 2,
    }
    assert all(name in page.text["ledger"] for name in ("hit", "wasted", "reused", "rejected"))
    assert_self_contained(page, text)


def test_hindsight_takes_the_pairs_with_the_most_rows_and_no_more_than_there_are_candidates():
    window = [{"rows": 9, "pairs": 2}, {"rows": 4, "pairs": 3}, {"rows": 1, "pairs": 100}]
    assert hindsight(window, 10) == [(0.2, 18.0), (0.5, 30.0), (1.0, 35.0)]
    assert hindsight(window[:2], 10) == [(0.2, 18.0), (0.5, 30.0)]
    assert hindsight(window, 2) == [(1.0, 18.0)]
    assert [rows_at([(0.2, 18.0), (0.5, 30.0)], share) for share in (0.1, 0.3, 0.9)] == [9.0, pytest.approx(22.0), 30.0]


def test_a_note_is_said_once_and_names_models_only_where_it_is_not_about_all():
    contains = "the interval of FM - VM contains 0"
    none = {key: [] for key in ReportData.__dataclass_fields__}
    rows = [
        *(evaluation(name, "transfer_ratio", None, note=contains) for name in ("base", "embeddings", "both")),
        evaluation("embeddings", "ne", 0.9, note="few rows"),
        evaluation("both", "ne", 0.9, note="few rows"),
        evaluation("base", "ne", 0.9),
        *(
            evaluation("embeddings", "transfer_ratio", None, sweep=sweep, setting="1", note=contains)
            for sweep in ("coverage", "ttl", "codec")
        ),
    ]
    data = ReportData(**{**none, "evaluations": [{**row, "seeds": 1} for row in rows]})
    notes = {section.id: section.notes for section in sections(data)}
    assert notes["uplift"] == [
        "world, NE of vm: embeddings, vm: both: few rows",
        f"world, transfer ratio: {contains}",
    ]
    assert notes["coverage-gain"] == notes["sweeps"] == []


def test_empty_tables_still_make_a_page_that_says_what_to_run(spark, make_config, tmp_path, fill):
    config = make_config("log.dataset=<script>alert(1)</script>")
    path = write_report(spark, config, tmp_path / "reports" / "report.html")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.plots == {} and page.tables == {}
    for section, job in {
        "coverage": "audit_coverage",
        "budget": "predict_pairs",
        "uplift": "evaluate_uplift",
        "ab": "simulate_ab",
        "neighbors": "find_neighbors",
        "snapshots": "export_snapshot",
    }.items():
        assert f"python -m jobs.{job} --as-of TIME" in page.text[section]
    assert_self_contained(page, text, [name for name in SECTIONS if name != "sweeps"])

    # Once there are rows, the next report replaces the page; nothing else is left beside it.
    fill("job_runs", [job_run("ingest_log", AS_OF, 2.0, rows=(1000, 990, 10))])
    assert write_report(spark, config, path) == path
    runs = Page(path.read_text(encoding="utf-8")).tables["jobs"]
    assert ["ingest_log", "1", "0", "2.0 s", "2.0 s", "1,000", "990", "10", "1,000", "990"] in runs
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def assert_self_contained(page, text, sections=SECTIONS):
    """No script, no reference outside the page, unique ids, inner references have targets, all sections are there."""
    assert "script" not in page.tags and "iframe" not in page.tags
    assert all(reference.startswith("#") for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{name}" for name in page.ids}
    assert [name for name in page.ids if name in SECTIONS] == sections
    # All colours of plots come from the page, so that they follow light and dark.
    styles = " ".join(re.findall(r'style="([^"]*)"', text))
    assert set(re.findall(r"#[0-9a-f]{6}", styles)) <= {"#ffffff"}
    assert set(re.findall(r"var\(--([a-z]+)\)", text)) <= set(re.findall(r"--([a-z]+):", text))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fmt.count(1234567), "1,234,567"),
        (fmt.count(None), "–"),
        (fmt.count(-5), "−5"),
        (fmt.share(0.4273), "42.7%"),
        (fmt.number(0.92751), "0.9275"),
        (fmt.number(0), "0"),
        (fmt.number(1e-6), "1e-06"),
        (fmt.number(float("nan")), "–"),
        (fmt.seconds(0.42), "0.4 s"),
        (fmt.seconds(95), "1 min 35 s"),
        (fmt.seconds(3599.7), "1 h 0 min"),
        (fmt.seconds(7300), "2 h 2 min"),
        (fmt.hours(5400), "1.5 h"),
        (fmt.size(1536), "1.5 KiB"),
        (fmt.size(3 * 2**50), "3072.0 TiB"),
        (fmt.flops(2.5e9), "2.5 GFLOP"),
        (fmt.flops(0), "0 FLOP"),
        (fmt.flops(3e19), "30,000 PFLOP"),
        (fmt.interval(0.5, None, 1.0), "0.5"),
        (fmt.interval(-0.2264, -0.5264, 0.07358, "%"), "−0.23% [−0.53, 0.07]"),
        (fmt.interval(-0.001, -0.3, 0.3), "0.00 [−0.30, 0.30]"),
        (fmt.interval(3, 3, 3), "3.0000 [3.0000, 3.0000]"),
        (fmt.interval(None, 0.1, 0.2), "–"),
        (fmt.text(""), "–"),
        (fmt.when(AS_OF + timedelta(minutes=5)), "2026-01-03 00:05"),
    ],
)
def test_numbers_are_written_for_people(shown, expected):
    assert shown == expected
