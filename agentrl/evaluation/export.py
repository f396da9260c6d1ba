"""A recorded run in formats that others read: JSON lines, Parquet, and Inspect's log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.records.files import read_episodes, write_bytes_atomic
from agentrl.records.rows import episode_row
from agentrl.trajectory import Episode
from agentrl.types import BadCall, Ending, Message, ToolCall

Row = dict[str, Any]


def export(run: Path, form: str, out: Path) -> int:
    """Write the episodes of a run to one file, which appears whole or not at all; return how many.

    Args:
        run: folder of an evaluation or a training run.
        form: a key of `FORMATS`.
        out: the file. Inspect's format is by its ending: `.eval` or `.json`.

    Raises:
        ConfigError: the run has no episodes, the format is unknown, its library is missing, or the
            file exists.
    """
    if form not in FORMATS:
        raise ConfigError(f"format {form!r} is unknown: use {', '.join(FORMATS)}")
    path = run / "episodes.jsonl"
    episodes = list(read_episodes(path).values()) if path.is_file() else []
    if not episodes:
        raise ConfigError(f"{run} holds no episodes: give the folder of an evaluation or a run")
    if out.exists():
        raise ConfigError(f"{out} exists: choose another file, or remove it")
    evaluation = run / "eval.json"
    result = json.loads(evaluation.read_bytes()) if evaluation.is_file() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    try:
        FORMATS[form](episodes, result, part)
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return len(episodes)


def flat_row(episode: Episode) -> Row:
    """One episode as one row: key, score, ending, counts, and the conversation as `messages`.

    A score that infrastructure prevented is None. Tokens and artifacts stay in `episodes.jsonl`.
    """
    counts = {name: value for name, value in vars(episode.counts).items() if name != "by_tool"}
    effects = episode.side_effects
    return {
        **episode.key._asdict(),
        "env": episode.env,
        "end": episode.end.value,
        "ending": episode.end.ending.value,
        "reward": episode.reward,
        "passed": episode.passed,
        "why": episode.score.why,
        "parts": dict(episode.score.parts),
        **counts,
        "side_effects": None if effects is None else dict(effects),
        "failure": episode.failure,
        "instruction": episode.task.instruction,
        "messages": episode_row(episode)["messages"],
    }


def _to_jsonl(episodes: Sequence[Episode], result: Mapping[str, Any], out: Path) -> None:
    lines = (json.dumps(flat_row(episode), default=repr) + "\n" for episode in episodes)
    write_bytes_atomic(out, "".join(lines).encode())


def _to_parquet(episodes: Sequence[Episode], result: Mapping[str, Any], out: Path) -> None:
    """Columns that hold no plain value are JSON text, since a column has one type."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("format parquet needs pyarrow: pip install pyarrow") from error
    rows = [flat_row(episode) for episode in episodes]
    for row in rows:
        for name in ("parts", "side_effects", "messages"):
            row[name] = json.dumps(row[name], default=repr)
    parquet.write_table(pyarrow.Table.from_pylist(rows), out)


def _to_inspect(episodes: Sequence[Episode], result: Mapping[str, Any], out: Path) -> None:
    try:
        from inspect_ai import log
    except ImportError as error:
        raise ConfigError(
            "format inspect needs the package inspect_ai: pip install 'agentrl[inspect]'"
        ) from error
    if out.suffix not in (".eval", ".json"):
        raise ConfigError(f"file name {out.name.removeprefix('.')!r} must end in .eval or .json")
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    policy = str(result.get("policy") or episodes[0].key.run)
    ids = list(dict.fromkeys(episode.task.id for episode in episodes))
    spec = log.EvalSpec(
        created=moment,
        task=episodes[0].env,
        model=policy,
        dataset=log.EvalDataset(
            name=str(result.get("split", "")), samples=len(ids), sample_ids=list(ids)
        ),
        config=log.EvalConfig(epochs=1 + max(episode.key.sample for episode in episodes)),
        metadata={name: result[name] for name in ("budget", "seed", "overlap") if name in result},
    )
    whole = not result.get("n_missing") and bool(result)
    log.write_eval_log(
        log.EvalLog(
            status="success" if whole else "cancelled",
            eval=spec,
            results=_inspect_results(episodes, result),
            stats=log.EvalStats(started_at=moment, completed_at=moment),
            samples=[_inspect_sample(episode, policy) for episode in _one_each(episodes)],
        ),
        out,
        format="eval" if out.suffix == ".eval" else "json",
    )


def _one_each(episodes: Iterable[Episode]) -> list[Episode]:
    """One episode per task, round and sample: the scored attempt if there is one."""
    last: dict[tuple[Any, ...], Episode] = {}
    for episode in episodes:
        place = (*episode.key._replace(attempt=0),)
        if place not in last or episode.reward is not None:
            last[place] = episode
    return list(last.values())


def _inspect_results(episodes: Sequence[Episode], result: Mapping[str, Any]) -> Any:
    from inspect_ai import log

    values = {f"pass@{k}": value for k, value in result.get("pass_at", {}).items()}
    values["mean_reward"] = result.get("mean_reward")
    metrics = {
        name: log.EvalMetric(name=name, value=value)
        for name, value in values.items()
        if value is not None
    }
    scored = sum(episode.reward is not None for episode in episodes)
    return log.EvalResults(
        total_samples=len(episodes),
        completed_samples=scored,
        scores=[log.EvalScore(name="passed", scorer="verifier", metrics=metrics)],
    )


def _inspect_sample(episode: Episode, policy: str) -> Any:
    from inspect_ai import log
    from inspect_ai.model import ModelUsage
    from inspect_ai.scorer import Score

    counts, messages = episode.counts, _inspect_messages(episode.messages)
    scores = None
    if episode.reward is not None:
        rest = {"reward": episode.reward, "parts": dict(episode.score.parts)}
        scores = {
            "passed": Score(
                value=int(bool(episode.passed)), explanation=episode.score.why, metadata=rest
            )
        }
    usage = ModelUsage(
        input_tokens=counts.prompt_tokens,
        output_tokens=counts.sampled_tokens,
        total_tokens=counts.prompt_tokens + counts.sampled_tokens,
        total_cost=counts.usd,
    )
    failed = episode.end.ending is Ending.FAILED
    text = {"message": episode.failure, "traceback": "", "traceback_ansi": ""}
    error = text if failed else None
    return log.EvalSample(
        id=episode.task.id,
        epoch=1 + episode.key.sample,
        input=episode.task.instruction,
        target="",
        messages=messages,
        scores=scores,
        metadata={"end": episode.end.value, "key": list(episode.key), "start": episode.start},
        model_usage={policy: usage},
        total_time=counts.wall_s,
        error=error,
    )


def _inspect_messages(messages: Sequence[Message]) -> list[Any]:
    from inspect_ai import model

    rows: list[Any] = []
    ids: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "tool":
            call_id = message.tool_call_id or (ids.pop(0) if ids else f"call_{place}")
            rows.append(
                model.ChatMessageTool(
                    content=message.content, tool_call_id=call_id, function=message.name
                )
            )
        elif message.role == "assistant":
            calls = [
                _inspect_call(call, f"call_{place}_{number}")
                for number, call in enumerate(message.tool_calls)
            ]
            ids = [call.id for call in calls]
            rows.append(
                model.ChatMessageAssistant(content=message.content, tool_calls=calls or None)
            )
        elif message.role == "system":
            rows.append(model.ChatMessageSystem(content=message.content))
        else:
            rows.append(model.ChatMessageUser(content=message.content))
    return rows


def _inspect_call(call: ToolCall | BadCall, number: str) -> Any:
    from inspect_ai.tool import ToolCall as InspectCall

    if isinstance(call, BadCall):
        return InspectCall(number, "unreadable", {"text": call.text}, parse_error=call.why)
    return InspectCall(call.id or number, call.name, dict(call.arguments))


FORMATS: Mapping[str, Callable[[Sequence[Episode], Mapping[str, Any], Path], None]] = {
    "jsonl": _to_jsonl,
    "parquet": _to_parquet,
    "inspect": _to_inspect,
}
"""Format -> what writes episodes and the summary of `eval.json`, {} without one, to a file."""
