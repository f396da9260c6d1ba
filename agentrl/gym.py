"""A ToolEnv as a `gymnasium.Env`: text actions, the 5-tuple, exceptions for infrastructure.

The async environment runs on one background loop, so this works in a script, in a notebook and
inside a running event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

import gymnasium
import numpy as np

from agentrl.aio import LoopThread, is_cancelled
from agentrl.calls import Guard
from agentrl.chat.parsers import FORMATTERS, PARSERS
from agentrl.env import Step, ToolEnv
from agentrl.errors import ConfigError, ToolFault, boundary
from agentrl.policies.base import noop
from agentrl.registry import factory
from agentrl.rollout.blame import blame, is_for_user
from agentrl.rollout.play import Setting, judge, play_witness
from agentrl.runner import Runner, borrow, closing, pool_for
from agentrl.sandboxes.base import SandboxPool
from agentrl.trajectory import EpisodeKey
from agentrl.types import Ending, Message, Score, Task, ToolCall
from agentrl.verifiers.base import Submission

_MAX_CHARS = 1_000_000


class Text(gymnasium.Space[str]):
    """Any text of at most `max_chars` characters.

    Gymnasium's own Text space has only ASCII letters and digits.

    Args:
        max_chars: longest text of the space.
        examples: texts that `sample` draws from beside random ones, for example valid tool calls.
    """

    _ALPHABET = "abcdefghijklmnopqrstuvwxyz ABC 0123456789 \n.,:;()[]{}<>=+-*/'\"äßλ→漢😀"

    def __init__(
        self, max_chars: int = _MAX_CHARS, examples: Iterable[str] = (), seed: int | None = None
    ) -> None:
        self.max_chars = max_chars
        self.examples = tuple(examples)
        super().__init__((), np.str_, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed length, so they do not flatten to an array."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """An example half of the time (if there are any), else up to 40 random characters."""
        if self.examples and self.np_random.random() < 0.5:
            return self.examples[int(self.np_random.integers(len(self.examples)))]
        picks = self.np_random.integers(
            len(self._ALPHABET), size=int(self.np_random.integers(1, 41))
        )
        return "".join(self._ALPHABET[int(pick)] for pick in picks)[: self.max_chars]

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text of the space."""
        return isinstance(x, str) and len(x) <= self.max_chars

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and (self.max_chars, self.examples) == (
            other.max_chars,
            other.examples,
        )

    def __repr__(self) -> str:
        return f"Text(max_chars={self.max_chars})"


_shared: LoopThread | None = None


def _loop() -> LoopThread:
    """The one loop on which all GymEnvs of this process run; a forked process starts its own."""
    global _shared
    if _shared is None or _shared.is_closed:
        _shared = LoopThread("agentrl-gym")
    return _shared


class GymEnv(gymnasium.Env[str, str]):
    """A ToolEnv as `gymnasium.Env`.

    `reset(options={"task": Task})` plays that task, `{"task_id": id}` looks one up among the first
    10,000 of the split, `{"split": "test"}` chooses the split (default "train"); otherwise the seed
    chooses the task. The reward is the verifier's, given with the last step; `info` holds messages,
    tools, task id, and at the end `end_reason`, `score_parts` and `why`. Time limits of single
    tools hold; the wall limit of an episode is the caller's to keep.

    Args:
        make: builds the environment.
        open_pool: opens sandboxes, once, when the first episode needs one.
        parser: how text becomes tool calls, a name of `agentrl.chat.parsers.PARSERS`.
        guard: builds the guard of one episode's tool calls; None for none.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - declared so by gymnasium

    def __init__(
        self,
        make: Callable[[], ToolEnv],
        open_pool: Callable[[], SandboxPool],
        parser: str = "hermes",
        render_mode: str | None = None,
        guard: Callable[[], Guard] | None = None,
    ) -> None:
        if parser not in PARSERS:
            raise ConfigError(f"parser={parser!r} is unknown: choose one of {', '.join(PARSERS)}")
        self._make = make
        self.env = make()
        self.render_mode = render_mode
        self.observation_space = Text()
        self.action_space = Text(examples=_example_calls(self.env))
        self._parse = PARSERS[parser]
        self._guard = guard
        self._runner = Runner(self.env)
        self._open_pool = open_pool
        self._pool: SandboxPool | None = None
        self._lease = AsyncExitStack()
        self._task: Task | None = None
        self._history: list[Message] = []
        self._opening = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode and return its opening text.

        Raises:
            ConfigError: an unknown option, or a task id that the split does not have.
            InfraError: no sandbox could be had.
        """
        super().reset(seed=seed)
        unknown = set(options or {}) - {"task", "task_id", "split"}
        if unknown:
            raise ConfigError(
                f"reset option {sorted(unknown)[0]!r} is unknown: use 'task', 'task_id' or 'split'"
            )
        task_seed, env_seed = (int(self.np_random.integers(2**31)) for _ in range(2))
        self._task = None
        task = self._choose(options or {}, task_seed)
        self._history = list(_loop().run(self._reset(task, env_seed)))
        self._opening = len(self._history)
        self._task = task
        return _as_text(self._history), self._info(self._history)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one assistant turn, given as text.

        What fails from the first step on ends the episode as the agent's fault, unless a witness
        without the agent meets it too (`agentrl.rollout.blame`).

        Raises:
            InfraError: infrastructure failed; there is no made-up reward.
        """
        if self._task is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        parsed = self._parse(action)
        message = Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)
        try:
            step, score = _loop().run(self._step(self._task, message))
        except BaseException:
            self._task = None  # the episode cannot go on
            raise
        self._history += [message, *step.messages]
        info = self._info(step.messages)
        if step.end is None or score is None or score.value is None:
            return _as_text(step.messages), 0.0, False, False, info
        self._task = None
        info |= {"end_reason": step.end.value, "score_parts": dict(score.parts), "why": score.why}
        truncated = step.end.ending is Ending.TRUNCATED
        return _as_text(step.messages), float(score.value), not truncated, truncated, info

    def render(self) -> str | None:
        """The conversation so far, when `render_mode="ansi"`."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"[{message.role}] {message.content}" for message in self._history)

    def close(self) -> None:
        """Give the sandboxes back; safe to call twice. A later `reset` opens new ones."""
        self._task = None
        if self._pool is not None:
            _loop().run(self._close())

    def _choose(self, options: dict[str, Any], seed: int) -> Task:
        if "task" in options:
            task = options["task"]
            if not isinstance(task, Task):
                raise ConfigError(f"reset option task={task!r} must be an agentrl.Task")
            return task
        split = options.get("split", "train")
        if "task_id" in options:
            for task in itertools.islice(self.env.tasks(split, 0), 10_000):
                if task.id == options["task_id"]:
                    return task
            raise ConfigError(
                f"task_id={options['task_id']!r} is not in split {split!r} of {self.env.id}"
            )
        first = next(iter(self.env.tasks(split, seed)), None)
        if first is None:
            raise ConfigError(f"{self.env.id} has no tasks in split {split!r}")
        return first

    async def _reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        await self._lease.aclose()
        # A new instance: a tool of the last episode may still run, and must not end this one.
        self.env = self._make()
        self._runner = Runner(self.env)
        guard = self._guard() if self._guard else None
        if self._pool is None:
            self._pool = self._open_pool()
        sandbox = await self._lease.enter_async_context(borrow(self.env, self._pool, task.view()))
        await self._lease.enter_async_context(closing(self._runner))
        async with boundary(ToolFault, f"{self.env.id}: reset"):
            return await self._runner.reset(task.view(), seed=seed, sandbox=sandbox, guard=guard)

    async def _step(self, task: Task, message: Message) -> tuple[Step, Score | None]:
        """One turn, and how the episode ends where that fails."""
        try:
            return await self._play(task, message)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            stopped = isinstance(error, asyncio.CancelledError) and is_cancelled()
            if stopped or is_for_user(error, spoke=True):
                raise
            setting = Setting(self._make, noop(), self._pool, guard=self._guard)
            key = EpisodeKey("gym", 0, task.id, 0)
            end, score = await blame(
                error, True, task.threshold, lambda: play_witness(setting, task, key)
            )
            if score.value is None:
                raise
            return Step((), end), score

    async def _play(self, task: Task, message: Message) -> tuple[Step, Score | None]:
        async with AsyncExitStack() as over:  # also where it fails: a witness needs the sandbox
            over.push_async_callback(self._lease.aclose)
            async with boundary(ToolFault, f"{self.env.id}: step"):
                step = await self._runner.step(message)
            if step.end is None:
                over.pop_all()
                return step, None
            async with boundary(ToolFault, f"{self.env.id}: collecting artifacts"):
                side_effects = await self._runner.side_effects()
                artifacts = await self._runner.collect()
        messages = (*self._history, message, *step.messages)
        submission = Submission(
            task,
            messages,
            step.end,
            artifacts,
            self._pool,
            opening=self._opening,
            untrusted=self.env.untrusted,
            side_effects=side_effects,
        )
        return step, await judge(self.env, submission)

    async def _close(self) -> None:
        pool, self._pool = self._pool, None
        try:
            await self._lease.aclose()
        finally:
            if pool is not None:
                await pool.close()

    def _info(self, messages: Iterable[Message]) -> dict[str, Any]:
        return {
            "messages": [
                {"role": message.role, "content": message.content} for message in messages
            ],
            "tools": [spec.schema() for spec in self.env.tools],
            "task_id": self._task.id if self._task else "",
        }


def _as_text(messages: Iterable[Message]) -> str:
    return "\n".join(message.content for message in messages)


def _example_calls(env: ToolEnv) -> list[str]:
    """One call without arguments per tool, valid where the tool requires none."""
    return [FORMATTERS["hermes"]("", (ToolCall(spec.name, {}),)) for spec in env.tools]


def make(
    env_id: str,
    *,
    sandbox: str = "auto",
    parser: str = "hermes",
    guard: Callable[[], Guard] | None = None,
    **settings: Any,
) -> GymEnv:
    """Build an environment as a `gymnasium.Env`.

    Args:
        env_id: an id of `agentrl list`.
        sandbox: backend for environments that need one: auto, docker, bubblewrap or process.
        parser: format in which the text of an action writes tool calls.
        guard: builds the guard of one episode's tool calls; None for no guard.
        settings: passed to the environment's constructor.

    Raises:
        ConfigError: unknown environment or setting.
    """
    render_mode = settings.pop("render_mode", None)
    build = factory(env_id, **settings)
    return GymEnv(build, lambda: pool_for(build(), sandbox, 2), parser, render_mode, guard)
