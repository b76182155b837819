import random
from datetime import timedelta

import pytest

from jobs.common.clock import micros
from jobs.common.errors import UserError
from jobs.common.models import latest_model, model_folder
from jobs.common.pair_features import FEATURES
from jobs.train_verifier import labels, run
from solaris_udf.verifier import DESCRIPTION, WEIGHTS, load
from tests.conftest import AS_OF, hours, log_row


def world(seed: int = 1):
    """Users with ten favourite items each, of which a request scores four, and two at random."""
    draw = random.Random(seed)
    rows = {}
    for user in range(12):
        favourites = draw.sample(range(60), 10)
        for _ in range(40):
            at = AS_OF - timedelta(seconds=draw.randrange(1, 72 * 3600))
            for item in {*draw.sample(favourites, 4), *draw.sample(range(60), 2)}:
                rows[user, item, at] = log_row(user, item, at)
    return list(rows.values())


def test_labels_count_rows_of_the_window_after_each_reference_time(tables, fill):
    fill(
        "ranking_log",
        [
            log_row(1, 1, AS_OF - hours(6)),
            log_row(1, 1, AS_OF - timedelta(microseconds=1)),  # first and last of the last window
            log_row(1, 1, AS_OF - hours(6) - timedelta(microseconds=1)),
            log_row(2, 1, AS_OF - hours(12)),
        ],
    )
    found = {
        (row["at"], row.user_id, row.item_id): row.label
        for row in labels(tables.read("ranking_log"), micros(AS_OF), 6.0).collect()
    }
    last, before = micros(AS_OF - hours(6)), micros(AS_OF - hours(12))
    assert found == {(last, 1, 1): 2, (before, 1, 1): 1, (before, 2, 1): 1}


def test_a_model_is_trained_from_the_past_and_the_future_changes_nothing(make_run, tables, fill):
    fill("ranking_log", world())
    overrides = (
        "train_verifier.windows=3",
        "train_verifier.validation_windows=1",
        "train_verifier.epochs=20",
        "predict_pairs.sources={recent=50, rising=3}",
    )
    job, settings = make_run("train_verifier", AS_OF, *overrides)
    report = run(job, settings)
    folder = model_folder(job.config, "verifier", AS_OF)
    first = ((folder / WEIGHTS).read_bytes(), load(folder))
    assert report.metrics["trained"] == 1 and report.metrics["reference_times"] == 3 and report.rows_in > 500
    assert first[1].features == FEATURES and first[1].window_hours == 6.0
    assert latest_model(job.config, "verifier", AS_OF) == folder
    assert latest_model(job.config, "verifier", AS_OF - hours(6)) is None
    # Favourites come back: the best fifth must hold clearly more than a fifth of the rows.
    assert report.metrics["captured_at_20"] > 0.3
    fill(
        "ranking_log",
        [log_row(user, 61, AS_OF) for user in range(12)]
        + [log_row(user, 62, AS_OF - hours(3), arrived_at=AS_OF + hours(1)) for user in range(12)],
        AS_OF + hours(6),
    )
    run(*make_run("train_verifier", AS_OF, *overrides))
    assert (folder / WEIGHTS).read_bytes() == first[0]
    assert load(folder).calibration == first[1].calibration


def test_too_little_history_trains_nothing(make_run, fill):
    job, settings = make_run("train_verifier", AS_OF, "predict_pairs.sources={recent=50}")
    assert run(job, settings).metrics["trained"] == 0  # no log at all
    fill("ranking_log", [log_row(1, 1, AS_OF - hours(age)) for age in range(1, 40)])
    report = run(job, settings)
    assert report.metrics["trained"] == 0 and report.rows_out == 0
    assert not (model_folder(job.config, "verifier", AS_OF) / DESCRIPTION).exists()


@pytest.mark.parametrize(
    "bad", ["train_verifier.validation_windows=8", "train_verifier.hidden=[0]", "train_verifier.model=gbdt"]
)
def test_settings_that_can_not_work_are_refused(make_config, bad):
    with pytest.raises(UserError, match="train_verifier"):
        make_config(bad)


def test_a_last_window_without_requests_trains_nothing_rather_than_on_nothing(make_run, fill):
    """Candidates there are, but none was scored in the window that validates: no calibration can come of it."""
    fill("ranking_log", [row for row in world() if row["event_time"] < AS_OF - hours(6)])
    job, settings = make_run(
        "train_verifier",
        AS_OF,
        "train_verifier.windows=3",
        "train_verifier.validation_windows=1",
        "predict_pairs.sources={recent=50}",
    )
    report = run(job, settings)
    assert report.rows_in > 500 and report.metrics["trained"] == 0
    assert not (model_folder(job.config, "verifier", AS_OF) / DESCRIPTION).exists()
