"""The page of `agentrl profile`: a histogram of pass rates, and what each sampler would spend.

Self-contained, without a script; ids of tasks and names reach it through Jinja's escaping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from agentrl.report.charts import nice_ticks
from agentrl.report.template import render

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 300, 46, 40, 12
HARDEST = 12
"""Tasks that the page lists by name, of those that are solved least."""


def profile_page(found: Mapping[str, Any]) -> str:
    """The page of a profile, from what `Profile.row` gives and the names of what was played."""
    rows = sorted(found["pass_rates"].items(), key=lambda item: (item[1][0] / item[1][1], item[0]))
    return render(
        "profile.html.j2",
        found=found,
        histogram=Markup(histogram_svg(**found["histogram"])),
        hardest=rows[:HARDEST],
    )


def histogram_svg(counted: Sequence[float], posterior: Sequence[float]) -> str:
    """Shares of tasks in equal bins of pass rate from 0 to 1: bars as counted, stairs as believed.
    Numbers only, so nothing in it needs escaping.
    """
    top = max(*counted, *posterior, 1e-9) * 1.05
    width, height = _WIDTH - _LEFT - 12, _HEIGHT - _BOTTOM - _TOP
    step = width / len(counted)

    def down(share: float) -> float:
        return _TOP + height * (1 - share / top)

    parts = []
    for tick in nice_ticks(0.0, top):
        at = down(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{100 * tick:g} %</text>'
        )
    for place, share in enumerate(counted):
        parts.append(
            '<rect class="tone-1" style="fill:var(--c);opacity:.55"'
            f' x="{_LEFT + place * step + 2:.1f}" y="{down(share):.1f}" width="{step - 4:.1f}"'
            f' height="{height * share / top:.1f}"/>'
        )
    stairs = []
    for place, share in enumerate(posterior):
        left = _LEFT + place * step
        stairs.append(f"{left:.1f} {down(share):.1f}L{left + step:.1f} {down(share):.1f}")
    parts.append(f'<path class="line tone-2" d="M{"L".join(stairs)}"/>')
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        at = _LEFT + tick * width
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{_LEFT + width / 2:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">pass rate of a'
        " task</text>"
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
