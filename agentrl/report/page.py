"""`report.html`: a run on one self-contained page, from the files of its folder.

The page loads nothing from anywhere. Episodes hold text that nobody vouches for, so every text
reaches the page either through Jinja's escaping or as JSON that a script turns into text nodes, and
a content security policy lets only the page's own script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from agentrl.errors import UserError
from agentrl.records.files import EpisodeFile, read_metrics, write_bytes_atomic
from agentrl.report import panels, viewer
from agentrl.report.charts import Chart, format_number, svg
from agentrl.report.headline import headline, is_number
from agentrl.report.safety import safety_tables
from agentrl.report.signs import coverage, find_signs
from agentrl.report.template import TEMPLATES, render
from agentrl.report.tripwires import TO_READ, Tripwires, put_aside
from agentrl.trajectory import EpisodeKey
from agentrl.types import Ending

DATA_BYTES = 2_200_000
"""Bytes of episodes on a page; charts and tables stay well below what is left of 3 MB."""

_Row = dict[str, Any]


def write_report(run_dir: str | Path, tokenizer: viewer.TokenDecoder | None = None) -> Path:
    """Build `report.html` in a run folder and return its path; episodes worth reading are put aside
    in `to_read/`.

    Read are, as far as they are there: `config.toml`, `metrics.jsonl`, `episodes.jsonl`,
        `eval.json` (a summary, or
    two of them under "before" and "after"). Token texts come from `tokenizer`, else from the newest
    checkpoint's or the model folder's `tokenizer.json`, else the page shows ids.

    Raises:
        UserError: the folder holds neither metrics nor episodes nor an evaluation, or one of them
            cannot be read.
    """
    folder = Path(run_dir)
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    evaluation = _evaluation(folder / "eval.json")
    settings = _settings(folder / "config.toml", evaluation)
    episodes, wires = EpisodeFile(folder / "episodes.jsonl"), Tripwires()
    recorded = (folder / "episodes.jsonl").is_file()
    lights = _lights(episodes, wires) if recorded else []
    if not (metrics or lights or evaluation):
        raise UserError(
            f"{folder} holds no metrics.jsonl, episodes.jsonl or eval.json; give the folder of"
            " a run"
        )
    model = _lookup(settings, "model", "model.path", "policy").removeprefix("hf:")
    decoder = tokenizer or viewer.find_decoder(folder, model)
    shown = _episodes(episodes, viewer.choose(lights))
    charts = panels.build_charts(metrics)
    page = render(
        "report.html.j2",
        **_script(),
        heading=_heading(folder, settings, metrics, lights),
        headline=headline(metrics, evaluation, _held_out_counts(lights)),
        tiles=_tiles(metrics, lights),
        signs=[
            *(find_signs(metrics) if metrics else ()),
            *(_flagged(folder, wires, episodes) if recorded else ()),
        ],
        coverage=coverage(metrics) if metrics else "",
        has_metrics=bool(metrics),
        charts=[
            {"index": place, "chart": chart, "svg": Markup(svg(chart))}
            for place, chart in enumerate(charts)
        ],
        settings=settings,
        endings=_endings(lights),
        tools=_tools(lights),
        safety=safety_tables([light.watched for light in lights]),
        shown=len(shown),
        total=len(lights),
        counted=_counted(lights),
        has_texts=decoder is not None,
        data=Markup(_script_json(_data(charts, shown, viewer.token_texts(shown, decoder)))),
    )
    target = folder / "report.html"
    write_bytes_atomic(target, page.encode(errors="backslashreplace"))
    return target


def _script() -> dict[str, str]:
    """The page's own script, and the hash by which its security policy knows it."""
    text = (TEMPLATES / "report.js").read_text()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"js": Markup(text), "js_hash": digest}


def _data(charts: Sequence[Chart], shown: list[_Row], vocab: dict[str, str]) -> dict[str, Any]:
    """What the page's script reads."""
    lines = [[{"points": panels.rounded(line.points)} for line in one.series] for one in charts]
    return {"charts": lines, "episodes": shown, "vocab": vocab}


def _script_json(data: Any) -> str:
    """JSON for a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _settings(path: Path, evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name → value, of `config.toml`; without one, what an evaluation says of itself."""
    if not path.is_file():
        return {
            name: str(evaluation[name])
            for name in ("env", "policy", "split", "seed")
            if name in evaluation
        }
    try:
        tree = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not TOML ({error}); restore the resolved configuration of the run"
        ) from error
    return dict(_flatten(tree, ""))


def _flatten(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            places = {str(place): one for place, one in enumerate(value)}
            flat += _flatten(places, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat.append((prefix + name, str(viewer.clip(text, 400))))
    return flat


def _lookup(settings: Mapping[str, str], *names: str) -> str:
    return next((settings[name] for name in names if settings.get(name)), "")


def _evaluation(path: Path) -> _Row:
    if not path.is_file():
        return {}
    try:
        row = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}); evaluate again or remove the file"
        ) from error
    return row if isinstance(row, dict) else {}


def _lights(episodes: EpisodeFile, wires: Tripwires) -> list[viewer.Light]:
    lights = {}
    for episode in episodes:
        lights[episode.key] = viewer.Light.of(episode)
        wires.see(episode)
    return list(lights.values())


def _held_out_counts(lights: Sequence[viewer.Light]) -> dict[int, dict[str, tuple[int, int]]]:
    """Round -> task -> (scored, passed) of the evaluations during training."""
    counts: dict[int, dict[str, tuple[int, int]]] = {}
    for light in lights:
        if light.held_out and light.passed is not None:
            of_round = counts.setdefault(light.key.round, {})
            scored, passed = of_round.get(light.key.task, (0, 0))
            of_round[light.key.task] = scored + 1, passed + light.passed
    return counts


def _flagged(folder: Path, wires: Tripwires, episodes: EpisodeFile) -> list[str]:
    """Put aside what a person should read; one sentence if tripwires flag some of it."""
    flags = put_aside(folder, wires, episodes)["flags"]
    kinds = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in flags.items())
    return (
        [f"Tripwires flag episodes ({kinds}): read those in {TO_READ}/ before believing the score."]
        if flags
        else []
    )


def _episodes(episodes: EpisodeFile, chosen: Mapping[EpisodeKey, Sequence[str]]) -> list[_Row]:
    """The chosen episodes as far as they fit, in the order of their keys."""
    if not chosen:
        return []
    last = episodes.read(chosen)
    rows: list[tuple[EpisodeKey, _Row]] = []
    room = DATA_BYTES
    for key, tags in chosen.items():
        row = viewer.viewer_row(last[key], tags)
        # A token costs about as much again for its entry in the vocabulary.
        size = len(_script_json(row).encode(errors="backslashreplace"))
        size += 24 * sum(len(segment["ids"]) for segment in row["segments"]) // 4
        if size <= room:
            room -= size
            rows.append((key, row))
    return [
        row
        for _, row in sorted(
            rows, key=lambda item: (item[0].run, item[0].step, *map(str, item[0][2:]))
        )
    ]


def _heading(
    folder: Path,
    settings: Mapping[str, str],
    metrics: Sequence[_Row],
    lights: Sequence[viewer.Light],
) -> _Row:
    parts = ("time/rollout_s", "time/update_s", "time/eval_s")
    seconds = sum(row[key] for row in metrics for key in parts if is_number(row.get(key)))
    facts = {
        "model": _lookup(settings, "model", "model.path"),
        "policy": _lookup(settings, "policy"),
        "recipe": _lookup(settings, "recipe", "algorithm", "recipe.name", "train.recipe"),
        "seed": _lookup(settings, "seed", "run.seed", "train.seed"),
        "steps": _steps(metrics),
        "episodes": _counted(lights) if lights else "",
        "wall time": duration(seconds) if seconds else "",
    }
    return {
        "env": (
            _lookup(settings, "env", "environment", "env.id", "environment.id")
            or folder.resolve().name
        ),
        "run": folder.resolve().name,
        "facts": {name: value for name, value in facts.items() if value},
    }


def _steps(metrics: Sequence[_Row]) -> str:
    """Steps that trained; a row with nothing but an evaluation, as before the first of them, is
    none.
    """
    trained = sum(
        any(not name.startswith("eval/") for name in row.keys() - {"step"}) for row in metrics
    )
    others = len(metrics) - trained
    return f"{trained} trained, {others} only evaluated" if others else str(trained or "")


def _counted(lights: Sequence[viewer.Light]) -> str:
    """How many episodes every table counts, and how many of them did not train."""
    held_out = sum(light.held_out for light in lights)
    return f"{len(lights):,}" + (f", {held_out:,} of them held-out" if held_out else "")


def _tiles(metrics: Sequence[_Row], lights: Sequence[viewer.Light]) -> list[_Row]:
    tiles: list[_Row] = []
    for label, key in (
        ("Reward", "reward/mean"),
        ("No-signal groups", "groups/no_signal"),
        ("Entropy", "policy/entropy"),
        ("Parity gap", "parity/gap_mean"),
        ("Tokens per second", "tokens_per_s"),
        ("Tokens per second", "time/tokens_per_s"),
    ):
        values = [row[key] for row in metrics if is_number(row.get(key))]
        if values:
            value = max(values) if key == "parity/gap_mean" else values[-1]
            note = (
                "nats, worst step"
                if key == "parity/gap_mean"
                else f"from {format_number(values[0])}"
            )
            tiles.append({"label": label, "value": format_number(value), "note": note})
    if lights:
        failed = sum(light.ending is Ending.FAILED for light in lights)
        cut = sum(light.ending is Ending.TRUNCATED for light in lights)
        share = f"{cut / len(lights):.1%}"
        tiles.append(
            {"label": "Truncated", "value": share, "note": f"of {len(lights):,} recorded episodes"}
        )
        tiles.append(
            {"label": "Lost", "value": f"{failed:,}", "note": "by infrastructure, unscored"}
        )
    return tiles


def _endings(lights: Sequence[viewer.Light]) -> list[_Row]:
    counts = Counter((light.end, light.ending.value) for light in lights)
    passed = Counter(light.end for light in lights if light.passed)
    return [
        {
            "reason": end,
            "kind": kind,
            "count": count,
            "share": count / len(lights),
            "passed": None if kind == "failed" else passed[end] / count,
            "tone": panels.END_TONES.get(end, "7"),
        }
        for (end, kind), count in counts.most_common()
    ]


def _tools(lights: Sequence[viewer.Light]) -> list[_Row]:
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for light in lights:
        calls += light.calls
        errors += light.errors
    rows = []
    for name, count in calls.most_common(30):
        scored = [
            light.passed for light in lights if name in light.calls and light.passed is not None
        ]
        rows.append(
            {
                "name": viewer.clip(name, 80),
                "calls": count,
                "errors": errors[name],
                "success": 1 - errors[name] / count,
                "episodes": len(scored),
                "passed": sum(scored) / len(scored) if scored else None,
            }
        )
    return rows


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min"
        if hours
        else f"{minutes} min {rest:02} s"
        if minutes
        else f"{rest} s"
    )
