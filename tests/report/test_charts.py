"""The drawings of a report: thinned series, ticks, gaps and numbers."""

from __future__ import annotations

import math

import pytest
from report_cases import report

from agentrl.records.files import MetricsWriter
from agentrl.report import panels
from agentrl.report.charts import Chart, Series, format_number, nice_ticks, svg, thin
from agentrl.report.page import duration
from agentrl.types import EndReason


def test_gaps_and_nonfinite_metrics_are_drawn_as_gaps(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(12):
            writer.write(
                {"step": step, "policy/kl": math.nan if step == 6 else 0.1 * step, "note": "text"}
            )
    page = report(tmp_path)
    assert "policy/kl was not finite at 1 step, first at step 6." in page.text
    points = page.data["charts"][0][0]["points"]
    assert points[6] == [6, None] and points[5] == [5, 0.5]
    assert page.raw.count('class="line') == 2


def test_thinning_keeps_spikes_and_gaps():
    points = [(float(step), 0.0) for step in range(10_000)]
    points[5003], points[7777] = (5003.0, 9.0), (7777.0, math.nan)
    kept = thin(points)
    assert (
        len(kept) <= 410 and (5003.0, 9.0) in kept and any(math.isnan(value) for _, value in kept)
    )
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_ticks_and_numbers():
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(-3e-7, 1e-6) == pytest.approx([0, 5e-7, 1e-6])
    shown = {
        0: "0",
        0.8251: "0.825",
        12.34: "12.3",
        123.9: "124",
        7181: "7,181",
        1.2e-7: "1.2e-7",
        3e6: "3e6",
        1: "1",
    }
    assert {value: format_number(value) for value in shown} == shown
    assert (format_number(None), format_number(math.nan)) == ("–", "nan")
    assert [duration(seconds) for seconds in (9.6, 75, 7320)] == [
        "10 s",
        "1 min 15 s",
        "2 h 02 min",
    ]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-9, 1e12, math.nan])
def test_a_chart_of_one_point_is_drawn(value):
    drawing = svg(Chart("t", "h", (Series("s", ((4.0, value),), "1"),)))
    assert "nan" not in drawing and "inf" not in drawing
    assert ("<circle" in drawing) == math.isfinite(value)


def test_every_ending_has_a_colour():
    assert set(panels.END_TONES) == {reason.value for reason in EndReason}
