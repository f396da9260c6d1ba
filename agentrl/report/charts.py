"""Line and area charts against training steps, as SVG: numbers only, so nothing in them needs
escaping.

Titles, legends and hints are HTML around the drawing; colours are CSS classes `tone-*`, which know
light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
MAX_POINTS = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 24


@dataclass(frozen=True)
class Series:
    """One line. `points` are (step, value) in order of steps, `band` (step, low, high); a value
    that is not finite breaks the line.
    """

    label: str
    points: tuple[Point, ...]
    tone: str
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """A drawing and the words around it.

    Attributes:
        hint: unit, and what to look for, in a few words.
        y_range: fixed limits of the y axis; None fits the values.
        stacked: areas on top of one another instead of lines; all series then have the same steps.
        wide: drawn for half a page instead of a third.
    """

    title: str
    hint: str
    series: tuple[Series, ...]
    y_range: Point | None = None
    stacked: bool = False
    wide: bool = False


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to the drawing's coordinates."""

    width: int
    height: int
    x: Point
    y: Point

    def across(self, step: float) -> float:
        return _LEFT + (step - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        share = min(max((value - self.y[0]) / (self.y[1] - self.y[0]), -0.02), 1.02)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def place(self, step: float, value: float) -> str:
        return f"{self.across(step):.1f} {self.down(value):.1f}"


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """At most about `limit` points that keep every spike: the lowest and the highest value of each
    stretch.
    """
    if len(points) <= limit:
        return tuple(points)
    width = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        broken = [point for point in stretch if not math.isfinite(point[1])][:1]
        finite = [point for point in stretch if math.isfinite(point[1])]
        ends = [min(finite, key=_value), max(finite, key=_value)] if finite else []
        kept += sorted(set(ends + broken))
    return tuple(kept)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between low and high, about `count` of them."""
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(
        (base * factor for factor in (1, 2, 2.5, 5) if base * factor >= raw * 0.999), base * 10
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def format_number(value: float | None) -> str:
    """Three significant digits, as short as they can be read."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 3 - len(str(int(size))))}f}" if size >= 1 else f"{value:.3f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def svg(chart: Chart) -> str:
    """The drawing; its frame travels in data attributes so that a script can find the step under
    the pointer.
    """
    width, height = (560, 260) if chart.wide else (380, 180)
    frame = _Frame(width, height, _x_range(chart), chart.y_range or _y_range(chart))
    parts = [*_axes(frame), *(_stack(chart, frame) if chart.stacked else _lines(chart, frame))]
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" data-left="{_LEFT}"'
        f' data-right="{width - _RIGHT}" data-low="{frame.x[0]:g}"'
        f' data-high="{frame.x[1]:g}">{"".join(parts)}<line class="cross" y1="{_TOP}"'
        f' y2="{height - _BOTTOM}"/></svg>'
    )


def interval_svg(
    before: tuple[float, float, float] | None, after: tuple[float, float, float]
) -> str:
    """Two values of a share with their intervals, on one axis from 0 to 1; each is (value, low,
    high).
    """
    frame = _Frame(560, 92, (0.0, 1.0), (0.0, 1.0))
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        at = frame.across(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="68"/>')
        parts.append(f'<text x="{at:.1f}" y="86" text-anchor="middle">{tick:g}</text>')
    for row, tone in ((before, "past"), (after, "1")):
        if row is None:
            continue
        height = 24 if tone == "past" else 50
        value, low, high = (frame.across(share) for share in row)
        parts.append(
            f'<line class="whisker tone-{tone}" x1="{low:.1f}" x2="{high:.1f}" y1="{height}"'
            f' y2="{height}"/><circle class="dot tone-{tone}" cx="{value:.1f}" cy="{height}"'
            ' r="6"/>'
        )
    return f'<svg viewBox="0 0 560 92" role="img">{"".join(parts)}</svg>'


def _axes(frame: _Frame) -> Iterable[str]:
    for tick in nice_ticks(*frame.y):
        at = frame.down(tick)
        yield (
            f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{at:.1f}"'
            f' y2="{at:.1f}"/>'
        )
        yield (
            f'<text x="{_LEFT - 6}" y="{at + 3.5:.1f}"'
            f' text-anchor="end">{format_number(tick)}</text>'
        )
    for tick in nice_ticks(*frame.x, 5):
        if tick == int(tick):
            at = frame.across(tick)
            yield f'<text x="{at:.1f}" y="{frame.height - 7}" text-anchor="middle">{tick:g}</text>'


def _lines(chart: Chart, frame: _Frame) -> Iterable[str]:
    for series in chart.series:
        if series.band:
            upper = [frame.place(step, high) for step, _, high in series.band]
            lower = [frame.place(step, low) for step, low, _ in reversed(series.band)]
            yield f'<path class="band tone-{series.tone}" d="M{"L".join(upper + lower)}Z"/>'
    for series in chart.series:
        for run in _finite_runs(series.points):
            places = [frame.place(*point) for point in run]
            if len(run) > 1:
                yield f'<path class="line tone-{series.tone}" d="M{"L".join(places)}"/>'
            if len(run) == 1 or (series.band and len(run) <= 30):
                for step, value in run:
                    yield (
                        f'<circle class="dot tone-{series.tone}" r="2.6" '
                        f'cx="{frame.across(step):.1f}" cy="{frame.down(value):.1f}"/>'
                    )


def _stack(chart: Chart, frame: _Frame) -> Iterable[str]:
    """Stairs, not slopes: a step's height is the step's own, and an evaluation every fifth step
    stays a bar.
    """
    steps = [step for step, _ in chart.series[0].points]
    middles = [(early + late) / 2 for early, late in pairwise(steps)]
    edges = list(zip([steps[0], *middles], [*middles, steps[-1]], strict=True))
    floor = [0.0] * len(steps)
    for series in chart.series:
        top = [
            low + (value if math.isfinite(value) else 0.0)
            for low, (_, value) in zip(floor, series.points, strict=True)
        ]
        upper = [
            frame.place(edge, value)
            for pair, value in zip(edges, top, strict=True)
            for edge in pair
        ]
        lower = [
            frame.place(edge, value)
            for pair, value in zip(edges, floor, strict=True)
            for edge in pair
        ]
        yield f'<path class="area tone-{series.tone}" d="M{"L".join(upper + lower[::-1])}Z"/>'
        floor = top


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _x_range(chart: Chart) -> Point:
    steps = [step for series in chart.series for step, _ in series.points]
    low, high = min(steps), max(steps)
    return (low, high) if high > low else (low - 1, high + 1)


def _y_range(chart: Chart) -> Point:
    if chart.stacked:
        totals = [
            math.fsum(value for _, value in column if math.isfinite(value))
            for column in _columns(chart)
        ]
        return 0.0, max(totals) or 1.0
    values = [
        value for series in chart.series for _, value in series.points if math.isfinite(value)
    ]
    values += [edge for series in chart.series for row in series.band for edge in row[1:]]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if 0 < low < 0.5 * high:  # a short way to zero: show the whole size
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def _columns(chart: Chart) -> Iterable[tuple[Point, ...]]:
    return zip(*(series.points for series in chart.series), strict=True)


def _value(point: Point) -> float:
    return point[1]
