"""The page of two evaluations: both pass@k curves, the difference, the tasks that changed sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from agentrl.records.files import write_bytes_atomic
from agentrl.report.charts import Chart, Series, svg
from agentrl.report.template import render


def write_comparison(result: Mapping[str, Any], target: Path) -> None:
    """Write what `agentrl.evaluation.compare.compare_runs` returned as one page."""
    page = render(
        "compare.html.j2",
        svg=Markup(svg(_chart(result["curve"]))) if result["curve"] else "",
        result=result,
    )
    write_bytes_atomic(target, page.encode(errors="backslashreplace"))


def _chart(rows: list[Mapping[str, Any]]) -> Chart:
    """Both curves over the logarithm of k, so that each doubling is as wide."""
    lines = tuple(
        Series(name, tuple((math.log2(row["k"]), row[name]) for row in rows), tone)
        for name, tone in (("first", "past"), ("second", "1"))
    )
    return Chart("pass@k", "share of tasks, over log2 k", lines, (0.0, 1.0), wide=True)
