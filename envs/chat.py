"""chat-v0: prompts to be answered once; a reward model, a rule or a judge says how well."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env import ToolEnv
from agentrl.envs.shared import check_keys
from agentrl.errors import ConfigError
from agentrl.records.taskfile import read_rows
from agentrl.safety.writes import WriteSet
from agentrl.types import Ending, Limits, Message, Task
from agentrl.verifiers import Term, shaped
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.named import depends_on, named_reward

Talk = tuple[Mapping[str, str], ...]


class ChatEnv(ToolEnv):
    """Answer a prompt; how good the answer is, is learnt or judged, and so can be wrong.

    Args:
        prompts: JSON lines (plain or gzip) with `prompt`, a text or a list of messages, and
            perhaps `chosen`, a good answer, which is then the reference.
        reward: who says how good an answer is: a reward model's folder or address,
            `path/to/file.py:function` with `function(prompt, answer) -> float`, `openai:MODEL@URL`
            or a `constitution.toml`.
        clip: a reward model's own numbers are held to [-clip, clip]; 0: their sigmoid.
        missing_eos: is taken off the reward of an answer that a limit cut short.
        threshold: reward from which on an answer passes.
        max_tokens: of an answer.
    """

    id: ClassVar[str] = "chat-v0"
    writes = WriteSet()

    def __init__(
        self,
        prompts: str = "",
        reward: str = "",
        clip: float = 0.0,
        missing_eos: float = 1.0,
        threshold: float = 0.5,
        max_tokens: int = 256,
    ) -> None:
        for name, value, least in (
            ("clip", clip, 0),
            ("missing_eos", missing_eos, 0),
            ("max_tokens", max_tokens, 1),
        ):
            if not least <= value < 10**9:
                raise ConfigError(f"chat-v0: {name}={value} must be at least {least}")
        self._prompts, self._threshold = prompts, threshold
        self.limits = Limits(turns=1, wall_s=300, turn_tokens=max_tokens, episode_tokens=max_tokens)
        if reward:
            cut = Term("missing_eos", missing_eos or 1.0, lambda said: -missing_eos * is_cut(said))
            verifier = named_reward(reward, clip)
            self.verifier = shaped(verifier, cut) if missing_eos else verifier
            if mark := depends_on(reward):
                self.depends_on = {"reward": mark}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """A fifth of the prompts is held out, by a hash of their text; they come in the file's
        order, or with a seed in another.
        """
        if split not in ("train", "test"):
            raise ConfigError(f"chat-v0: split={split!r} must be 'train' or 'test'")
        if not (self._prompts and hasattr(self, "verifier")):
            raise ConfigError(
                "chat-v0: prompts and reward must be set: --set prompts=FILE.jsonl, and --set"
                " reward= a reward model's folder or address, file.py:function, openai:MODEL@URL"
                " or constitution.toml"
            )
        rows = list(read_prompts(self._prompts))
        if seed:
            random.Random(f"{split}-{seed}").shuffle(rows)
        for talk, chosen in rows:
            mark = hashlib.sha256(repr(talk).encode()).hexdigest()[:12]
            if (int(mark, 16) % 5 == 0) == (split == "test"):
                yield Task(
                    id=f"chat-{mark}",
                    instruction=talk[-1]["content"],
                    metadata={"talk": [dict(message) for message in talk]},
                    oracle={"answer": chosen} if chosen else {},
                    threshold=self._threshold,
                )

    def prompt(self) -> list[Message]:
        """The messages of the prompt."""
        talk: Any = self.task.metadata["talk"]
        return [Message(one["role"], one["content"]) for one in talk]


@cache
def read_prompts(path: str) -> tuple[tuple[Talk, str], ...]:
    """Prompts of a file, each once, with their good answers or "".

    Raises:
        ConfigError: a row has no prompt, or one that does not end on words of the user.
        TaskError: the file cannot be read.
    """
    found: dict[str, tuple[Talk, str]] = {}
    for number, row in read_rows(Path(path)):
        check_keys(row, ("prompt",), f"chat-v0: {path}, line {number}")
        given, chosen = row["prompt"], row.get("chosen")
        talk: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not (isinstance(talk, list) and talk and all(map(_is_message, talk))) or (
            talk[-1]["role"] != "user"
        ):
            raise ConfigError(
                f"chat-v0: {path}, line {number}: prompt={json.dumps(given)[:40]} must be a text,"
                " or a list of messages {role, content} of which the last is the user's"
            )
        good = chosen if isinstance(chosen, str) else ""
        found.setdefault(repr(talk), (tuple(talk), good))
    return tuple(found.values())


def is_cut(submission: Submission) -> bool:
    """Whether a limit ended the answer, and not the model."""
    return submission.end.ending is Ending.TRUNCATED


def _is_message(row: Any) -> bool:
    known = ("system", "user", "assistant")
    return (
        isinstance(row, dict)
        and row.get("role") in known
        and isinstance(row.get("content"), str)
        and bool(row["content"].strip())
    )
