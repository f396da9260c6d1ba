"""A page from its template: everything that it is given is escaped, unless it is `Markup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentrl.records.plain import plain
from agentrl.report.charts import format_number

TEMPLATES = Path(__file__).parent / "templates"


def render(name: str, **context: Any) -> str:
    """The page of a template, with the style that all pages share as `css`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    css = Markup((TEMPLATES / "report.css").read_text())
    return plain(environment.get_template(name).render(css=css, **context), lines=True)
