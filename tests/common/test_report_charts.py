"""Plots of the report: what stands on their axes."""

import re
from datetime import UTC, datetime

import pytest

from jobs.common.report_charts import lines, stacked_bars

ONLY = datetime(2026, 1, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    "chart",
    [
        lines("Recall", "", [("recall", "blue", "solid", [ONLY], [0.9])]),
        stacked_bars("Rows", "", [ONLY], [("pair", "blue", [3.0])]),
    ],
    ids=["lines", "bars"],
)
def test_a_single_time_stands_in_its_day_and_not_among_years(chart):
    for svg in chart.svg.values():
        labels = re.findall(r"<text[^>]*>([^<]+)<", svg)
        assert {"12:00", "Jan-03", "2026-Jan-03"} <= set(labels)
        assert not [label for label in labels if re.fullmatch(r"\d{4}", label)]
