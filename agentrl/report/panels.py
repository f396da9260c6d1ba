"""Which metrics a report draws, together with what, and what a reader should look for in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.report.charts import MAX_POINTS, Chart, Point, Series, thin
from agentrl.report.signs import series
from agentrl.types import Ending, EndReason

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One chart: lines are (label, metric name)."""

    title: str
    hint: str
    lines: tuple[tuple[str, str], ...]
    y_range: Point | None = None


PANELS = (
    Panel(
        "Entropy",
        "nats per sampled token; exploration dies at zero",
        (("entropy", "policy/entropy"),),
    ),
    Panel(
        "KL divergence",
        "nats per token",
        (("to the sampler", "policy/kl"), ("to the reference", "policy/ref_kl")),
    ),
    Panel(
        "Clip fraction",
        "share of trained tokens at each bound",
        (("below", "policy/clip_low"), ("above", "policy/clip_high")),
    ),
    Panel(
        "Groups without signal",
        "share of groups whose rewards that train are all equal",
        (
            ("no signal", "groups/no_signal"),
            ("all solved", "groups/all_pass"),
            ("all failed", "groups/all_fail"),
        ),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Rewards before and after",
        "share of episodes with an outcome of 0 or 1, of all that were played and of what trains",
        (
            ("0, played", "reward/sampled_0"),
            ("1, played", "reward/sampled_1"),
            ("0, trained", "reward/trained_0"),
            ("1, trained", "reward/trained_1"),
        ),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Pass rate of all tasks",
        "of the curriculum's whole pool, estimated, with its 95 % interval; and of what was played",
        (
            ("all tasks", "curriculum/pass_all"),
            ("low", "curriculum/pass_all_low"),
            ("high", "curriculum/pass_all_high"),
            ("played", "curriculum/pass_played"),
        ),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Episodes thrown away",
        "share of those played, where groups without signal are left out",
        (("thrown away", "refill/thrown_share"),),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Reward model behind an address",
        "its version; share of scores beyond those of all pairs that it was checked on",
        (
            ("version", "reward/part/reward_model_version"),
            ("beyond", "reward/part/reward_model_beyond"),
        ),
    ),
    Panel("Gradient norm", "before clipping", (("norm", "policy/grad_norm"),)),
    Panel("Loss", "of an offline stage, per step", (("loss", "train/loss"),)),
    Panel(
        "Implicit rewards",
        "β times the log-ratio to the reference; the chosen line must not fall far below zero",
        (
            ("chosen", "train/rewards/chosen"),
            ("rejected", "train/rewards/rejected"),
            ("margin", "train/rewards/margins"),
        ),
    ),
    Panel(
        "Preferences told apart",
        "share of training pairs whose chosen response has the higher reward",
        (("policy", "train/rewards/accuracies"), ("reward model", "train/accuracy")),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Largest ratio", "π_new / π_old over the step's tokens", (("ratio", "policy/ratio_max"),)
    ),
    Panel("Response length", "sampled tokens per episode", (("tokens", "length/sampled_mean"),)),
    Panel(
        "Turns and tool calls",
        "per episode",
        (("turns", "length/turns_mean"), ("tool calls", "tools/calls_mean")),
    ),
    Panel(
        "Tool errors",
        "share of calls; unreadable: share of episodes with one",
        (("error", "tools/error_rate"), ("unreadable", "format/bad_calls_rate")),
    ),
    Panel(
        "Sampler against scorer",
        "gap of log-probabilities, nats per token",
        (("mean", "parity/gap_mean"), ("max", "parity/gap_max")),
    ),
    Panel(
        "Critic",
        "variance of returns that it explains; 1 is all",
        (("explained", "value/explained_variance"),),
    ),
    Panel(
        "Side effects",
        "share of measured episodes with one, and of guarded ones with a denied call",
        (("side effects", "side_effects/rate"), ("denied", "safety/denied_rate")),
        y_range=(0.0, 1.0),
    ),
    Panel(
        "Price of a side effect",
        "what is taken off the reward",
        (("penalty", "safety/penalty"),),
    ),
    Panel(
        "Cut short",
        "share of episodes that met a limit",
        (("truncated", "episodes/truncated"),),
    ),
    Panel(
        "Throughput",
        "tokens per second",
        (("tokens/s", "tokens_per_s"), ("tokens/s", "time/tokens_per_s")),
    ),
)

_TONES = {
    Ending.TERMINATED: ("end-a", "end-b", "end-c", "end-d"),
    Ending.TRUNCATED: ("cut-a", "cut-b", "cut-c", "cut-d", "cut-e"),
    Ending.FAILED: ("bad-a", "bad-b", "bad-c"),
}


def _end_tones() -> dict[str, str]:
    tones = {}
    for ending, names in _TONES.items():
        reasons = [reason for reason in EndReason if reason.ending is ending]
        tones.update(
            {reason.value: names[index % len(names)] for index, reason in enumerate(reasons)}
        )
    return tones


END_TONES = _end_tones()
"""Colour of each ending: one family of colours per kind of ending."""


def build_charts(rows: Rows) -> list[Chart]:
    """All charts for which something was logged: the four wide ones first, then the panels."""
    charts = [
        _held_out(rows),
        _reward(rows),
        _endings(rows),
        _time(rows),
        *(_panel(panel, rows) for panel in PANELS),
    ]
    return [chart for chart in charts if any(line.points for line in chart.series)]


def rounded(points: Sequence[Point]) -> list[tuple[float, float | None]]:
    """Points for the page's script, to four significant digits; what is not finite becomes null."""
    return [
        (step, float(f"{value:.4g}") if math.isfinite(value) else None) for step, value in points
    ]


def _held_out(rows: Rows) -> Chart:
    band = tuple(
        (row["step"], row["eval/ci95_low"], row["eval/ci95_high"])
        for row in rows
        if all(_is_finite(row.get(key)) for key in ("eval/ci95_low", "eval/ci95_high"))
    )
    lines = (
        Series("held-out pass@1", thin(series(rows, "eval/pass_at_1")), "1", band),
        Series("pass rate in training", thin(series(rows, "pass/train")), "past"),
    )
    return Chart(
        "Held-out pass@1",
        "share of tasks never trained on; band: 95 % interval",
        tuple(line for line in lines if line.points),
        y_range=(0.0, 1.0),
        wide=True,
    )


def _reward(rows: Rows) -> Chart:
    points = thin(series(rows, "reward/mean"))
    spread = dict(series(rows, "reward/std"))
    band = tuple(
        (step, mean - spread[step], mean + spread[step])
        for step, mean in points
        if math.isfinite(mean) and math.isfinite(spread.get(step, math.nan))
    )
    return Chart(
        "Reward",
        "mean over episodes; band: one standard deviation",
        (Series("mean", points, "2", band),),
        wide=True,
    )


def _endings(rows: Rows) -> Chart:
    logged = {key for row in rows for key in row if key.startswith("end/")}
    known = [reason for reason in END_TONES if f"end/{reason}" in logged]
    others = sorted(
        key.removeprefix("end/") for key in logged if key.removeprefix("end/") not in END_TONES
    )
    lines = tuple(
        Series(reason.replace("_", " "), _levels(rows, f"end/{reason}"), END_TONES.get(reason, "7"))
        for reason in [*known, *others]
    )
    return Chart(
        "How episodes end", "share of episodes", lines, y_range=(0.0, 1.0), stacked=True, wide=True
    )


def _time(rows: Rows) -> Chart:
    parts = (
        ("rollout", "time/rollout_s"),
        ("update", "time/update_s"),
        ("evaluation", "time/eval_s"),
    )
    lines = tuple(
        Series(label, _levels(rows, key), str(index + 1))
        for index, (label, key) in enumerate(parts)
        if series(rows, key)
    )
    return Chart("Time per step", "seconds", lines, stacked=True, wide=True)


def _panel(panel: Panel, rows: Rows) -> Chart:
    lines = tuple(
        Series(label, thin(points), str(index + 1))
        for index, (label, key) in enumerate(panel.lines)
        if (points := series(rows, key))
    )
    return Chart(panel.title, panel.hint, lines, panel.y_range)


def _levels(rows: Rows, key: str) -> tuple[Point, ...]:
    """One point per stretch of steps, its mean; a step without the metric counts as zero, so that
    areas add up.
    """
    width = math.ceil(len(rows) / MAX_POINTS)
    values = [row[key] if _is_finite(row.get(key)) else 0.0 for row in rows]
    return tuple(
        (
            rows[start]["step"],
            math.fsum(values[start : start + width]) / len(values[start : start + width]),
        )
        for start in range(0, len(rows), width)
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
