"""The page of two evaluations: both pass@k curves, the difference, the tasks that changed sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentrl.records.files import write_bytes_atomic
from agentrl.records.plain import plain
from agentrl.report.charts import Chart, Series, svg

_TEMPLATES = Path(__file__).parent / "templates"


def write_comparison(result: Mapping[str, Any], target: Path) -> None:
    """Write what `agentrl.evaluation.results.compare.compare_runs` returned as one page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("compare.html.j2").render(
        css=Markup((_TEMPLATES / "report.css").read_text()),
        svg=Markup(svg(_chart(result["curve"]))) if result["curve"] else "",
        result=result,
    )
    write_bytes_atomic(target, plain(page, lines=True).encode(errors="backslashreplace"))


def _chart(rows: list[Mapping[str, Any]]) -> Chart:
    """Both curves over the logarithm of k, so that each doubling is as wide."""
    lines = tuple(
        Series(name, tuple((math.log2(row["k"]), row[name]) for row in rows), tone)
        for name, tone in (("first", "past"), ("second", "1"))
    )
    return Chart("pass@k", "share of tasks, over log2 k", lines, (0.0, 1.0), wide=True)
