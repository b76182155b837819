import io
import re

import pytest
from rich.console import Console

from jobs.common.budget_curve import Curve, budget_curves
from jobs.common.budget_view import latest_past_slice, show_budget, write_budget
from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from jobs.predict_pairs import Settings
from tests.conftest import AS_OF, hours, log_row


def test_a_curve_is_linear_between_its_points():
    curve = Curve("x", ((0.1, 5.0), (0.3, 7.0)))
    assert [curve.rows_at(share) for share in (0.05, 0.1, 0.2, 0.3, 0.9)] == [2.5, 5.0, 6.0, 7.0, 7.0]
    assert Curve("x", ()).rows_at(0.5) == 0.0


@pytest.fixture
def window(fill):
    """Four candidates, by frequency (1, 10), (1, 11), (2, 12), (2, 13); the window scores the last, and a stranger."""
    fill(
        "ranking_log",
        [
            *(log_row(1, 10, AS_OF - hours(age)) for age in (10, 11, 12)),
            *(log_row(1, 11, AS_OF - hours(age)) for age in (13, 14)),
            log_row(2, 12, AS_OF - hours(20)),
            log_row(2, 13, AS_OF - hours(40)),
        ],
    )
    fill(
        "ranking_log",
        [
            *(log_row(2, 13, AS_OF + hours(age)) for age in (1, 2, 3)),
            log_row(1, 10, AS_OF),
            log_row(9, 99, AS_OF + hours(1)),
        ],
        AS_OF + hours(6),
    )
    fill("candidate_pairs", [{"user_id": 1, "item_id": 10}, {"user_id": 2, "item_id": 12}])
    fill("candidate_pairs", [{"user_id": 1, "item_id": 10}], AS_OF + hours(6))  # its window is not over


def test_each_rule_buys_what_it_says_and_the_window_judges(spark, make_config, window, tmp_path):
    config = make_config("predict_pairs.sources={recent=10}")
    assert latest_past_slice(spark, config) == slice_of(AS_OF)
    found = budget_curves(spark, config, config.get(Settings), AS_OF, flops=False)
    assert (found.candidates, found.rows, found.verifier_used) == (4, 5, False)
    at = {curve.rule: [curve.rows_at(share) for share in (0.25, 0.5, 0.75, 1.0)] for curve in found.curves}
    # No verifier: it is the frequency. Recency differs in nothing here, and hindsight takes the three rows first.
    assert at["verifier"] == at["frequency"] == at["recency"] == [1.0, 1.0, 1.0, 4.0]
    assert at["hindsight"] == [3.0, 4.0, 4.0, 4.0]
    assert at["random"][-1] == 4.0
    assert found.taken == (0.5, 1)  # (1, 10) and (2, 12), of four pairs
    out = io.StringIO()
    show_budget(found, Console(file=out, width=150))
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:-1] for line in out.getvalue().splitlines() if "%" in line[:8]
    }
    assert [cell.strip() for cell in rows["50%"]][:3] == ["20.0%", "20.0%", "20.0%"]
    assert "chose 50.0% of the cost and covered 20.0%" in out.getvalue()
    page = write_budget(found, config, tmp_path / "budget.html").read_text()
    assert page.count("<svg") == 2 and "hindsight" in page
    # What is plotted stands in a table too: 201 budgets, and the run's own choice.
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")]
    assert [row[0] for row in rows if len(row) == 7][-201:] == [f"{step / 2:.1f}%" for step in range(201)]
    assert ["75.0%", *["20.0%"] * 3] in [row[:4] for row in rows] and ["50.0%", "1", "20.0%"] in rows


def test_what_can_not_be_judged_is_said(spark, make_config, window):
    config = make_config("predict_pairs.sources={recent=10}")
    with pytest.raises(UserError, match="its window 0 scored rows"):
        budget_curves(spark, config, config.get(Settings), AS_OF + hours(60), flops=False)
    with pytest.raises(UserError, match="run the next slice's ingest_log"):
        latest_past_slice(spark, make_config(f"storage.root={config.storage.root}-empty"))
