"""A chart of the report as a picture that stands alone in a document."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.report.charts import Chart, Series, svg


def drawing(lines: Sequence[Series]) -> str:
    """Shares from 0 to 1 as an SVG file, its legend above; the tone of a line is its colour."""
    chart = Chart("", "", tuple(lines), y_range=(0.0, 1.0), wide=True)
    above = 16 * len(lines)
    legend = "".join(
        f'<text x="60" y="{16 * place + 10 - above}" fill="{line.tone}">{line.label}</text>'
        for place, line in enumerate(lines)
    )
    colours = "".join(
        f".line.tone-{tone[1:]}{{stroke:{tone}}}.dot.tone-{tone[1:]}{{fill:{tone}}}"
        f".band.tone-{tone[1:]}{{fill:{tone};opacity:.15}}"
        for tone in dict.fromkeys(line.tone for line in lines)
    )
    style = (
        "<style>text{font:11px sans-serif}.line{fill:none;stroke-width:2}.grid{stroke:#ddd}"
        f".cross{{display:none}}{colours}</style>"
    )
    drawn = svg(chart).replace("tone-#", "tone-").replace("</svg>", f"{legend}</svg>")
    framed = drawn.replace('viewBox="0 0 560 260"', f'viewBox="0 {-above} 560 {260 + above}"', 1)
    return framed.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f">{style}", 1
    )
