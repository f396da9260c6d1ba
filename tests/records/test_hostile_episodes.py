"""Episodes of hostile texts, arguments and artifacts, read by every tool-call format: all are
scored, recorded and readable, and a run that is cut off goes on with what is missing.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from helpers import right

from agentrl import Limits, Message, Task, ToolEnv, tool
from agentrl.chat.parsers import PARSERS
from agentrl.policies.base import Scripted
from agentrl.records.files import EpisodeWriter, iter_episodes, read_episodes
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Dispatch, Rollouts
from agentrl.sandboxes import open_pool
from agentrl.types import ToolCall

PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|call|>", "<|im_end|>"),
    *("<function=say>", "</function>", "<parameter=text>", "<|tool_call_begin|>", "###", "```json"),
    *(
        '{"name": "say", "arguments": {"text": "x"}}',
        '{"name": "submit", "arguments": {}}',
        "{",
        "}",
    ),
    *('"arguments": ', "say(text='x')", '[say(text="x")]', "NaN", "1e999", "-0", "9" * 400, "null"),
    *("\x00", "\x1b[2J", "\u202e", "\ud800", "\udfff", "\U0001f600", "\u2028", "\\ud800", "\r\n"),
    *("[" * 300, '{"a":' * 200, "%s", "../../etc/passwd", "__proto__", "' OR 1=1 --", " " * 500),
    *("<think>", "</think>", "constructor", "yes", "A" * 5000),
]
NAMES = [
    "out.txt",
    "../up",
    "/etc/passwd",
    "a" * 300,
    "\ud800",
    "",
    ".",
    "x\x00y",
    "d/e/f",
    "out.txt/x",
]


class Hostile(ToolEnv):
    """Repeats, and writes files if it has a sandbox."""

    id = "hostile-v0"
    verifier = right
    limits = Limits(turns=4, tool_calls=6, bad_calls=3, wall_s=30, tool_s=10)
    artifacts = ("out.txt",)

    def tasks(self, split: str, seed: int):
        return iter(())

    @tool
    async def say(self, text: str) -> str:
        """Repeat a text."""
        return text

    @tool
    def submit(self) -> str:
        """End the episode."""
        self.finish()
        return "submitted"


class Boxed(Hostile):
    """The same with a sandbox, into which it writes files."""

    needs_sandbox = True

    @tool
    async def write(self, path: str, text: str) -> str:
        """Write a file."""
        await self.sandbox.put({path: text.encode("utf-8", "surrogateescape")})
        return "written"


def hostile_text(chance: random.Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.randint(0, 8)))


def hostile_value(chance: random.Random, depth: int = 0):
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return hostile_text(chance)
    if kind < 4:
        return chance.choice([None, True, -0.0, 1e308, 2**70, float("inf"), float("nan"), 10**400])
    if kind == 4:
        return [hostile_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {hostile_text(chance): hostile_value(chance, depth + 1) for _ in range(3)}


def turns(task: Task) -> list[Message]:
    """What the agent of this task says: read by the format that the task names, or called by it."""
    chance = random.Random(task.id)
    parse = PARSERS[task.metadata["format"]]
    messages = []
    for _ in range(3):
        if chance.random() < 0.5:
            parsed = parse(hostile_text(chance))
            messages.append(Message.assistant(parsed.content, *parsed.calls))
        else:
            name = chance.choice(["say", "write", "submit", hostile_text(chance)])
            arguments = {"path": chance.choice(NAMES), "text": hostile_value(chance)}
            messages.append(Message.assistant(hostile_text(chance), ToolCall(name, arguments)))
    return messages


def play_all(env: type[Hostile], count: int, folder: Path) -> None:
    formats = sorted(PARSERS)
    tasks = [
        Task(id=f"t{n}", instruction="x", hidden={}, metadata={"format": formats[n % len(formats)]})
        for n in range(count)
    ]
    path = folder / "episodes.jsonl"
    for part in (tasks[: count // 3], tasks):  # the second start goes on with what is missing
        known = {key.task for key in read_episodes(path)} if path.exists() else set()
        with EpisodeWriter(path) as writer:
            pool = open_pool("bubblewrap", size=4) if env.needs_sandbox else None
            setting = Setting(env, Scripted("hostile", turns), pool=pool)
            rollouts = Rollouts(setting, concurrency=32, on_episode=writer.write)
            try:
                missing = [task for task in part if task.id not in known]
                assert known == {task.id for task in tasks[: len(known)]}
                rollouts.dispatch(missing, Dispatch()).gather()
            finally:
                rollouts.close()
    episodes = list(iter_episodes(path))
    assert [episode.key.task for episode in episodes].count("t0") == 1
    assert len(episodes) == len({episode.key for episode in episodes}) == count
    assert [episode.key for episode in episodes if episode.score.value is None] == []


def test_hostile_episodes_are_recorded_and_readable(tmp_path):
    play_all(Hostile, 10 * len(PARSERS), tmp_path)


@pytest.mark.long
def test_thousands_of_hostile_episodes_are_recorded_and_readable(tmp_path, bubblewrap):
    """AGENTRL_HOSTILE_EPISODES says how many; a tenth of them play in sandboxes."""
    count = int(os.environ.get("AGENTRL_HOSTILE_EPISODES", "2000"))
    (tmp_path / "boxed").mkdir()
    play_all(Hostile, count - count // 10, tmp_path)
    play_all(Boxed, count // 10, tmp_path / "boxed")
