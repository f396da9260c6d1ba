"""One-line builders for tests: tasks, episodes, groups, an engine that emits given ids, a tiny real
model.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from agentrl.chat.parsers import PARSERS
from agentrl.engines.base import Generation, Sampling
from agentrl.env import ToolEnv
from agentrl.policies.base import Scripted
from agentrl.rollout.play import Setting, play
from agentrl.rollout.rollouts import Rollouts
from agentrl.sandboxes import SandboxLimits, open_pool
from agentrl.tools import tool
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import BadCall, EndReason, Limits, Message, Score, Task, ToolCall
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.admission import admit
from agentrl.verifiers.code.hidden_tests import hidden_tests

REPO = Path(__file__).resolve().parents[2]


def make_task(task_id: str = "t", **fields) -> Task:
    return Task(**{"id": task_id, "instruction": "do it", **fields})


def tasks_of(count: int) -> list[Task]:
    """Tasks for `Echo`, t0 and so on."""
    return [make_task(f"t{index}", hidden={"answer": "yes"}) for index in range(count)]


def make_episode(
    reward: float | None = 1.0, *, task: str = "t", sample: int = 0, end=None, **fields
) -> Episode:
    end = end or (EndReason.SANDBOX_LOST if reward is None else EndReason.SUBMITTED)
    score = Score.failed("lost") if reward is None else Score(reward)
    key = EpisodeKey("run", 0, task, sample)
    base = {
        "key": key,
        "env": "e-v0",
        "task": make_task(task).view(),
        "start": "s",
        "messages": (),
        "end": end,
    }
    return Episode(**{**base, "score": score, **fields})


def make_group(*rewards: float | None, task: str = "t") -> Group:
    return Group(
        tuple(make_episode(reward, task=task, sample=index) for index, reward in enumerate(rewards))
    )


def make_branch(prompt: int = 2, *turns: tuple[int, int]) -> Trajectory:
    """A branch with a prompt of some tokens and turns of (sampled, observed) tokens."""
    segments = [Segment.prompt(range(1, prompt + 1))]
    for sampled, observed in turns:
        segments.append(Segment.sampled(range(sampled), [-1.0] * sampled, 0, "stop"))
        segments += [Segment.observation(range(observed))] if observed else []
    return Trajectory(tuple(segments))


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments)


def calls_of(parser: str, text: str) -> tuple[ToolCall | BadCall, ...]:
    """The calls that a named parser finds."""
    return PARSERS[parser](text).calls


def same(left: object, right: object) -> bool:
    """Equality that tells 1 from True and -0.0 from 0.0."""
    return left == right and repr(left) == repr(right)


def says(*calls, content: str = "") -> Message:
    return Message.assistant(content, *calls)


def script(*messages: Message) -> Scripted:
    return Scripted("script", lambda task: messages)


async def right(submission: Submission) -> Score:
    """The verifier that is content if the last answer is the hidden one."""
    return Score(float(submission.answer == submission.task.hidden.get("answer", "")))


class Echo(ToolEnv):
    """An environment without sandbox: it repeats, and ends on demand."""

    id = "echo-v0"
    verifier = right
    limits = Limits(turns=6, tool_calls=6, bad_calls=3, wall_s=20, tool_s=5)
    count = 40

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for index in range(self.count):
            yield make_task(f"{split}-{index}", hidden={"answer": "yes"}, oracle={"answer": "yes"})

    @tool
    async def say(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: what to repeat.
        """
        return text

    @tool
    def submit(self) -> str:
        """End the episode."""
        self.finish()
        return "submitted"


def play_one(
    env: type[ToolEnv] | Callable[[], ToolEnv], policy, task: Task | None = None, **setting
) -> Episode:
    """One episode on a loop of its own."""
    task = task or make_task(hidden={"answer": "yes"})
    return asyncio.run(
        play(Setting(env, policy, **setting), task, EpisodeKey("run", 0, task.id, 0))
    )


def observations(episode: Episode) -> list[str]:
    """What its tools answered, one a call."""
    return [message.content for message in episode.messages if message.role == "tool"]


@contextmanager
def rollouts(
    env, policy, *, pool=None, seed=0, deterministic=False, **options
) -> Iterator[Rollouts]:
    """Rollouts that are closed at the end of the block."""
    playing = Rollouts(
        Setting(env, policy, pool, seed=seed, deterministic=deterministic), **options
    )
    try:
        yield playing
    finally:
        playing.close()


class FakeEngine:
    """Emits given ids, turn by turn, whatever it is asked; remembers its prompts."""

    def __init__(
        self, *turns: Sequence[int], stop_ids=frozenset(), context_length: int = 4096
    ) -> None:
        self.version = 0
        self.context_length = context_length
        self.turns = turns
        self.stop_ids = stop_ids
        self.prompts: list[tuple[int, ...]] = []
        self.asked: list[Sampling] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        ids = tuple(self.turns[len(self.prompts) % len(self.turns)])[: sampling.max_tokens]
        self.prompts.append(tuple(prompt_ids))
        self.asked.append(sampling)
        stopped = ids[-1] in self.stop_ids
        return Generation(ids, (-0.5,) * len(ids), "stop" if stopped else "length", self.version)

    def seat(self):
        return nullcontext()

    async def close(self) -> None:
        pass


@functools.cache
def tiny_model_folder() -> Path:
    """A randomly initialised Qwen2 with its tokenizer as an ordinary model folder; made once per
    test session.
    """
    from agentrl.trainers.models.tiny import build_model, build_tokenizer

    texts = [
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n",
        '<tool_call>{"name": "say", "arguments": {"text": "yes"}}',
    ] * 9
    folder = tempfile.TemporaryDirectory(prefix="agentrl-tiny-")
    tiny_model_folder.keep = folder
    return build_model(folder.name, build_tokenizer(texts), width=32, layers=2, context=512)


def refused(tasks: Sequence[Task], sandbox: str = "bubblewrap") -> dict[str, str]:
    """Task id -> why hidden tests do not admit it; graders have room for large public tasks."""

    async def run():
        pool = open_pool(sandbox, size=3, limits=SandboxLimits(memory_mb=4096))
        try:
            return await admit(tasks, hidden_tests(), pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def run_cli(
    *arguments: str | Path, timeout: float = 280, **env: str
) -> subprocess.CompletedProcess[str]:
    """The real command line in a process of its own."""
    words = [sys.executable, "-m", "agentrl.cli", *map(str, arguments)]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
        cwd=REPO,
        check=False,
    )


def last_json(text: str):
    return json.loads(text.strip().splitlines()[-1])


def children() -> set[int]:
    """Processes below this one, with those that it has not collected."""
    return below([os.getpid()], dead=True) - {os.getpid()}


EARLIER: set[threading.Thread] = set()
"""Threads from before the current test; conftest fills it, so that what a failed test left fails no
other one.
"""


def loop_threads() -> set[str]:
    """Names of the event loops' and engines' threads that the current test has started."""
    ours = ("agentrl-loop", "agentrl-samp")
    return {
        thread.name
        for thread in set(threading.enumerate()) - EARLIER
        if thread.name.startswith(ours)
    }


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Fail unless the condition ever comes true; so much time is for slow, cold and busy machines,
    and no measure.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def growth(work: Callable[[int], object], size: int, times: int = 4) -> float:
    """How many times the processor time of `work(times * size)` is that of `work(size)`, each the
    least of five in turns: no figure of one machine, and other programs may be at work, too.
    """
    seconds: dict[int, list[float]] = {size: [], times * size: []}
    for _ in range(5):
        for one, found in seconds.items():
            begun = time.process_time()
            work(one)
            found.append(time.process_time() - begun)
    small, large = map(min, seconds.values())
    return large / max(small, 1e-4)  # less is as little as this clock can tell


@contextmanager
def process(*words: str | Path, **options) -> Iterator[subprocess.Popen]:
    """A process in the checkout whose standard output is read; killed at the end, and its pipes
    closed.
    """
    started = subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE, **options)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in filter(None, (started.stdout, started.stderr)):
            pipe.close()


def parents(dead: bool = False) -> dict[int, int]:
    """pid -> parent of every process of this machine that lives; with the dead who wait to be
    collected, if wanted.
    """
    table = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if dead or state != "Z":
            table[int(entry.name)] = int(parent)
    return table


def below(pids: Iterable[int], dead: bool = False) -> set[int]:
    """Some processes, as far as they are there, with all that descends from them."""
    table, found = parents(dead), set(pids)
    while more := {child for child, parent in table.items() if parent in found} - found:
        found |= more
    return found & table.keys()
