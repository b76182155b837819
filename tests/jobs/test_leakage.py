"""A label that becomes known after as_of changes no feature: of no model, and of no row that it belongs to."""

from datetime import timedelta

import numpy as np
import pytest
from pyspark.sql import functions as F

from jobs import join_features, update_histories
from jobs.common.candidates import candidates, horizon_of
from jobs.common.item_table import write_item_table
from jobs.common.log import log_before
from jobs.common.pair_features import features
from jobs.common.pair_statistics import open_view
from jobs.common.vm_data import Span, load_rows
from jobs.train_foundation import labels_by, user_sequences, with_conversions
from tests.conftest import AS_OF, hours, log_row
from tests.jobs.snapshots import Pair, User, snapshot_row, vector, write_snapshot

FIRST, CUT, END = AS_OF - hours(12), AS_OF - hours(6), AS_OF  # what comes from CUT on is the future
USERS, ITEMS, ROWS = 5, 6, 60


def random_log(seed):
    """Rows of each slice, of which about half are clicked: [(slice's end, rows)]."""
    draw = np.random.default_rng(seed)
    log = []
    for end in (FIRST, CUT, END):
        minutes = np.sort(draw.choice(359, ROWS, replace=False))
        rows = [
            log_row(
                int(draw.integers(USERS)),
                int(draw.integers(ITEMS)),
                end - hours(6) + timedelta(minutes=int(minute)),
                request_id=f"{end:%H}-{minute}",
                shown=bool(draw.random() < 0.8),
                clicked=bool(draw.random() < 0.5),
            )
            for minute in minutes
        ]
        log.append((end, [{**row, "clicked": row["clicked"] and row["shown"]} for row in rows]))
    return log


def permuted(rows, seed):
    """The same rows, the labels of those shown dealt out anew."""
    shown = [place for place, row in enumerate(rows) if row["shown"]]
    order = np.random.default_rng(seed).permutation(shown)
    labels = dict(zip(shown, (rows[place]["clicked"] for place in order), strict=True))
    assert any(rows[place]["clicked"] != label for place, label in labels.items())
    return [{**row, "clicked": labels.get(place, row["clicked"])} for place, row in enumerate(rows)]


@pytest.fixture
def all_features(root, make_run, fill, tables):
    """all_features(log) -> name -> what each model reads as of CUT, and what the small model reads of later rows."""
    fill("items", [{"item_id": item, "category_id": item % 2, "features": [0.5]} for item in range(ITEMS)], FIRST)
    made = write_snapshot(root, CUT, [Pair(1, 1, CUT, vector(1))], [User(2, CUT, vector(2))])
    fill("snapshots", [snapshot_row(made, CUT)], CUT)

    def of(log):
        for end, rows in log:
            fill("ranking_log", rows, end)
            clicked = [row for row in rows if row["clicked"]]
            events = [
                {
                    "request_id": row["request_id"],
                    "item_id": row["item_id"],
                    "occurred_at": row["event_time"],
                    "arrived_at": end + timedelta(minutes=1),  # with the next slice
                }
                for row in clicked
            ]
            fill("label_events", events, end + hours(6))
        for end, _ in log:
            update_histories.run(*make_run("update_histories", end))
        run, settings = make_run("predict_pairs", CUT)
        with open_view(tables, [CUT], horizon_of(run.config, settings), CUT) as view:
            verifier = features(view, candidates(view, settings)).orderBy("user_id", "item_id").toPandas()
        run, settings = make_run("join_features", END)
        join_features.run(run, settings)
        served = [name for name in tables.read("training_rows").columns if name not in ("clicked", "labels", "run_id")]
        span = Span(CUT, END, "m1", None, ROWS)
        items = write_item_table(make_run("evaluate_uplift", END)[0])
        rows = load_rows(run, span, items, max_rows=ROWS, counter_hours=24, foundation=False).rows
        histories = tables.read("user_histories").where(F.col("as_of") <= F.lit(CUT)).drop("run_id")
        return {
            "histories": histories.orderBy("slice", "user_id").toPandas().to_dict("list"),
            "verifier": verifier.to_dict("list"),
            "foundation": user_sequences(with_conversions(log_before(tables, CUT, 240), labels_by(tables, CUT)))
            .orderBy("user_id")
            .toPandas()
            .to_dict("list"),
            "served": tables.read_slice("training_rows", END)
            .select(served)
            .orderBy("request_id")
            .toPandas()
            .to_dict("list"),
            "small model": {name: getattr(rows, name).tolist() for name in ("ids", "numbers", "flags", "pair", "user")},
        }, rows.label.tolist()

    return of


@pytest.mark.slow
def test_labels_permuted_after_as_of_change_no_feature(all_features):
    log = random_log(1)
    before, labels = all_features(log)
    assert all(len(next(iter(table.values()))) > 4 for table in before.values())
    later = [*log[:2], (END, permuted(log[2][1], 2))]
    after, other = all_features(later)
    assert labels != other
    for name, table in before.items():
        assert str(after[name]) == str(table), name  # as text: NaN equals NaN
    # What was known by then does count, so the comparison can fail.
    earlier, _ = all_features([log[0], (CUT, permuted(log[1][1], 3)), log[2]])
    changed = {name for name, table in before.items() if str(earlier[name]) != str(table)}
    assert changed == set(before) - {"served"}
