"""Which episodes a report shows, and what of them: bounded in number and size, chosen so that
people read widely.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from agentrl.evaluation.summary import error_kind, outcomes
from agentrl.report.safety import Watched, safety_row
from agentrl.trajectory import Episode, EpisodeKey, Segment, SegmentKind
from agentrl.types import Ending, Message, ToolCall

MAX_EPISODES = 60
MAX_TOKENS = 6000
MAX_MESSAGES = 80
MAX_CHARS = 4000

_KIND = {SegmentKind.PROMPT: "p", SegmentKind.SAMPLED: "s", SegmentKind.OBSERVATION: "o"}


class TokenDecoder(Protocol):
    """What a report needs of a tokenizer; those of `transformers` and of `tokenizers` both fit."""

    def decode(self, ids: Any, /, *, skip_special_tokens: bool) -> Any:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Light:
    """The little of an episode that is kept of every one of them."""

    key: EpisodeKey
    end: str
    ending: Ending
    reward: float | None
    passed: bool | None
    calls: Counter[str]
    errors: Counter[str]
    watched: Watched

    @property
    def held_out(self) -> bool:
        """Whether it was played by an evaluation inside of a training run."""
        return self.key.phase == "eval"

    @classmethod
    def of(cls, episode: Episode) -> Light:
        """Read it off an episode; a call's outcome is the fixed form of its tool message."""
        calls: Counter[str] = Counter()
        errors: Counter[str] = Counter()
        for outcome in outcomes(episode):
            name = outcome.name or "(unreadable call)"
            calls[name] += 1
            errors[name] += bool(outcome.error)
        return cls(
            episode.key,
            episode.end.value,
            episode.end.ending,
            episode.reward,
            episode.passed,
            calls,
            errors,
            Watched.of(episode),
        )


def choose(
    episodes: Sequence[Light], limit: int = MAX_EPISODES, seed: int = 0
) -> dict[EpisodeKey, list[str]]:
    """Pick episodes and say why: first and last step, highest and lowest reward, held-out tasks,
    odd endings, side effects, calls that a guard stopped, random.

    The kinds take turns, so that any leading part of the answer is as mixed as the whole.
    """
    shuffled = random.Random(seed).sample(episodes, len(episodes))
    scored = [row for row in shuffled if row.reward is not None]
    steps = sorted({row.key.step for row in episodes}) or [0]
    kinds = {
        "last step": [row for row in shuffled if row.key.step == steps[-1]],
        "top reward": sorted(scored, key=lambda row: -(row.reward or 0.0)),
        "first step": [row for row in shuffled if row.key.step == steps[0]],
        "lowest reward": sorted(scored, key=lambda row: row.reward or 0.0),
        "random": shuffled,
        "truncated": [row for row in shuffled if row.ending is Ending.TRUNCATED],
        "held-out": [row for row in shuffled if row.held_out],
        "side effect": [row for row in shuffled if row.watched.kinds],
        "stopped": [row for row in shuffled if row.watched.is_stopped],
        "infra": [row for row in shuffled if row.ending is Ending.FAILED],
    }
    chosen: dict[EpisodeKey, list[str]] = {}
    share = max(2, limit // 6)
    for turn in zip_longest(*(rows[:share] for rows in kinds.values())):
        for kind, row in zip(kinds, turn, strict=True):
            if row is not None and (row.key in chosen or len(chosen) < limit):
                chosen.setdefault(row.key, []).append(kind)
    for row in shuffled:
        if len(chosen) >= limit:
            break
        chosen.setdefault(row.key, []).append("random")
    return chosen


def viewer_row(episode: Episode, tags: Sequence[str]) -> dict[str, Any]:
    """An episode as the page's script wants it: texts clipped, at most MAX_TOKENS tokens, shared
    segments once.
    """
    indices: dict[Segment, int] = {}
    segments: list[dict[str, Any]] = []
    branches, room, cut = [], MAX_TOKENS, 0
    for branch in episode.trajectories:
        places = []
        for segment in branch.segments:
            if segment not in indices:
                if len(segment.ids) > room:
                    cut += len(segment.ids)
                    room = 0
                    continue
                room -= len(segment.ids)
                indices[segment] = len(segments)
                segments.append(_segment_row(segment))
            places.append(indices[segment])
        branches.append({"shared": branch.shared, "segments": places})
    counts, score, effects = episode.counts, episode.score, episode.side_effects
    return {
        "key": dict(zip(EpisodeKey._fields, (clip(part) for part in episode.key), strict=True)),
        "env": episode.env,
        "end": episode.end.value,
        "ending": episode.end.ending.value,
        "reward": score.value,
        "passed": episode.passed,
        "why": clip(score.why),
        "parts": {clip(name): repr(float(value)) for name, value in list(score.parts.items())[:30]},
        "counts": {name: value for name, value in vars(counts).items() if name != "by_tool"},
        "tags": list(tags),
        "messages": [_message_row(message) for message in episode.messages[:MAX_MESSAGES]],
        "messages_cut": max(0, len(episode.messages) - MAX_MESSAGES),
        "artifacts": {
            clip(path): clip(body.decode(errors="replace"))
            for path, body in _first(episode.artifacts)
        },
        "side_effects": effects and {clip(name): clip(how) for name, how in _first(effects)},
        **_clipped(safety_row(episode, MAX_MESSAGES)),
        "segments": segments,
        "branches": branches,
        "tokens_cut": cut,
    }


def token_texts(rows: Iterable[Mapping[str, Any]], decoder: TokenDecoder | None) -> dict[str, str]:
    """Text of every token id in the rows, each decoded alone; empty without a decoder."""
    if decoder is None:
        return {}
    ids = {token for row in rows for segment in row["segments"] for token in segment["ids"]}
    return {str(token): _token_text(decoder, token) for token in sorted(ids)}


def find_decoder(run_dir: Path, model: str) -> TokenDecoder | None:
    """Load `tokenizer.json` of the newest checkpoint, or of a local `model` folder; None if there
    is no way to.
    """
    newest = sorted(
        run_dir.glob("checkpoints/*/model/tokenizer.json"), key=lambda path: _number(path.parts[-3])
    )
    candidates = [*reversed(newest), *([Path(model) / "tokenizer.json"] if model else [])]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    decoder: TokenDecoder = Tokenizer.from_file(str(found))
    return decoder


def clip(text: Any, limit: int = MAX_CHARS) -> Any:
    """Cut the middle out of a long text and say so; what is no text passes."""
    if not isinstance(text, str) or len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n… {len(text) - limit} characters cut …\n{text[-tail:]}"


def _clipped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _clipped(item) for name, item in value.items()}
    return [_clipped(item) for item in value] if isinstance(value, list | tuple) else clip(value)


def _first(items: Mapping[str, Any], limit: int = 8) -> list[tuple[str, Any]]:
    return list(items.items())[:limit]


def _message_row(message: Message) -> dict[str, Any]:
    calls = [
        {
            "name": clip(call.name),
            "arguments": clip(json.dumps(dict(call.arguments), ensure_ascii=False, default=str)),
        }
        if isinstance(call, ToolCall)
        else {"bad": clip(call.text), "why": clip(call.why)}
        for call in message.tool_calls
    ]
    row = {"role": message.role, "content": clip(message.content)}
    extra = {"name": message.name, "reasoning": clip(message.reasoning), "calls": calls}
    error = message.role == "tool" and bool(error_kind(message.content))
    return {
        **row,
        **{name: value for name, value in extra.items() if value},
        **({"error": True} if error else {}),
    }


def _segment_row(segment: Segment) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": _KIND[segment.kind], "ids": segment.ids}
    if segment.kind is SegmentKind.SAMPLED:
        logprobs = [round(logprob, 4) + 0.0 for logprob in segment.logprobs]
        row.update(logprobs=logprobs, version=segment.version, finish=segment.finish)
    return row


def _token_text(decoder: TokenDecoder, token: int) -> str:
    text = str(decoder.decode([token], skip_special_tokens=False))
    name = getattr(decoder, "id_to_token", None) or getattr(decoder, "convert_ids_to_tokens", None)
    piece = name(token) if name else None
    if isinstance(piece, str) and (not text or "\ufffd" in text):
        return piece  # part of a character, or an id without text of its own
    if isinstance(piece, str) and piece.startswith("\u2581") and not text.startswith(" "):
        return " " + text  # sentencepiece drops the space of a word that stands alone
    return text


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else -1
