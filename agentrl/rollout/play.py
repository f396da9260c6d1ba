"""play(setting, task, key) -> Episode: one episode from reset to score."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.aio import is_cancelled
from agentrl.calls import Guard, recordable
from agentrl.dialogue import Dialogue, PolicyUser
from agentrl.env import ToolEnv
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    ContractError,
    InfraError,
    ToolFault,
    UserError,
    VerifierError,
    WallLimitMet,
    boundary,
)
from agentrl.policies.base import Player, Policy, TokenPolicy, thinking_s, usage_of
from agentrl.policies.continued import Continued
from agentrl.policies.served import ServedPolicy
from agentrl.rollout.blame import Witness, answers, blame, is_for_user
from agentrl.runner import Runner, borrow, closing
from agentrl.sandboxes.base import Sandbox, SandboxPool
from agentrl.specs import RunSpec, VerifierSpec
from agentrl.trajectory import Episode, EpisodeKey
from agentrl.types import EndReason, Message, Score, Task, ToolCall
from agentrl.verifiers.base import Submission, grade, where_raised
from agentrl.waits import Waiter, owned_by, waiting

_SAMPLING = (TokenPolicy, ServedPolicy, Continued, Witness)
"""Policies that sample from a model, whose errors may come from the model's text, and the witness.
Every other policy is the user's own code."""


@dataclass(frozen=True)
class Setting:
    """The live parts that the episodes of a run share.

    `Setting.open` builds it from a `RunSpec`; a caller in one process may also pass live parts.

    Attributes:
        env: builds a fresh environment instance: an `EnvSpec`, or any function.
        policy: who acts.
        pool: lends sandboxes; None if neither the environment nor its verifier needs one.
        run: name of the run, part of every episode's key.
        seed: base seed of the run; every other seed is derived from it.
        deterministic: whether the clock must not decide a reward; then an episode that meets its
            wall limit counts as failed by infrastructure.
        guard: builds the guard of one episode: a `GuardSpec`, or any function; None for no guard.
        envs: in a run of several environments: prefix of the task ids, before a slash, -> `env`.
        user: speaks for the user of a dialogue; None for the environment's own user.
        side_effect_price: taken off the reward of an episode with a side effect; None: nothing.
    """

    env: Callable[[], ToolEnv]
    policy: Policy
    pool: SandboxPool | None = None
    run: str = "run"
    seed: int = 0
    deterministic: bool = False
    guard: Callable[[], Guard] | None = None
    envs: Mapping[str, Callable[[], ToolEnv]] = field(default_factory=dict)
    user: Policy | None = None
    side_effect_price: float | None = None

    @classmethod
    def open(cls, spec: RunSpec, policy: Policy | None = None, log: Path | None = None) -> Setting:
        """Build the parts of a run; nothing starts before the first episode.

        Args:
            spec: the run.
            policy: a live policy in place of the spec's own, such as one that shares its model
                with a learner.
            log: file for what a vLLM engine prints.

        Raises:
            ConfigError: a part cannot be built here, or there is no policy.
        """
        env = spec.env.build()
        if policy is None:
            if spec.policy is None:
                raise ConfigError("the specs of this run name no policy: pass a live one")
            policy = spec.policy.build(env, log)
        return cls(
            env=spec.env,
            policy=policy,
            pool=spec.pool.build() if spec.pool else None,
            run=spec.run,
            seed=spec.seed,
            deterministic=spec.deterministic,
            guard=spec.guard,
            envs={env.prefix: env for env in spec.envs if env.prefix},
            user=spec.user.build(env, log) if spec.user else None,
        )

    @property
    def makes(self) -> tuple[Callable[[], ToolEnv], ...]:
        """What builds the environments of the run, at least one."""
        return tuple(self.envs.values()) or (self.env,)

    def of(self, task: Task) -> Setting:
        """The setting for one task: with the environment that its id belongs to."""
        if not self.envs:
            return self
        return replace(self, env=self.envs[task.id.partition("/")[0]], envs={})

    def build_env(self) -> ToolEnv:
        """A fresh environment with the run's user and the price of side effects.

        Raises:
            ConfigError: a user is set and the environment is not a dialogue.
        """
        env = self.env()
        if self.user is not None:
            if not isinstance(env, Dialogue):
                raise ConfigError(
                    f"{env.id} has no user whom a policy could play: derive it from"
                    " agentrl.Dialogue",
                    setting="user",
                )
            env.user = PolicyUser(self.user)
        if self.side_effect_price is not None:
            added = VerifierSpec(side_effect_price=self.side_effect_price)
            env.verifier = added.build(env.verifier)
        return env

    def witness(self) -> Setting:
        """The same without the agent."""
        return replace(self, policy=Witness(self.env()))


@dataclass
class _Progress:
    """The episode so far; it survives whatever interrupts the episode."""

    env: ToolEnv
    history: list[Message] = field(default_factory=list)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    side_effects: dict[str, str] | None = None
    player: Player | None = None
    opening: int = 0
    begun: bool = False  # whether the environment is set up
    acting: bool = False  # whether it is the policy's turn

    @property
    def spoke(self) -> bool:
        """Whether the agent has said anything yet."""
        return len(self.history) > self.opening or bool(self.player and self.player.trajectories)

    def __post_init__(self) -> None:
        self.runner = Runner(self.env)


async def play(
    setting: Setting, task: Task, key: EpisodeKey, version: int | None = None
) -> Episode:
    """Play one episode from reset to score; whatever breaks is recorded under its name.

    An episode that infrastructure broke has no score; one that the agent broke has failed (see
    `blame`).

    Args:
        version: version of the policy's weights at the start, for the record.

    Raises:
        UserError: the environment or the task is wrong for every episode alike, or the policy is
            the user's own code and has a bug.
    """
    with owned_by(owner_of(key)):
        return await _play(setting, task, key, version)


def owner_of(key: EpisodeKey) -> Waiter:
    """Who waits, in an episode."""
    return Waiter(f"task {key.task!r} sample {key.sample}", key.round, key.phase)


async def _play(setting: Setting, task: Task, key: EpisodeKey, version: int | None) -> Episode:
    try:
        progress = _Progress(setting.build_env())
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a constructor may raise anything
        return _unmade(setting, task, key, error)
    try:
        end, score = await _attempt(setting, task, key, progress)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        stopped = isinstance(error, asyncio.CancelledError) and is_cancelled()
        if stopped or is_for_user(error, progress.spoke):
            raise

        async def witness() -> None:
            if progress.acting:
                env, opening = progress.env, progress.history[: progress.opening]
                await answers(setting.policy, task, env.limits, opening, env.tools)
            else:
                await play_witness(setting, task, key)

        end, score = await blame(error, progress.spoke, task.threshold, witness)
    episode = _episode(progress, task, key, end, score)
    return replace(episode, seed=setting.seed, version=version)


async def play_witness(setting: Setting, task: Task, key: EpisodeKey) -> None:
    """Play and judge the same episode without the agent.

    Raises:
        Exception: whatever broke.
    """
    await _attempt(setting.witness(), task, key, _Progress(setting.build_env()))


async def judge(env: ToolEnv, submission: Submission) -> Score:
    """The verdict, asked for once more where there was none.

    Raises:
        InfraError: there was none the second time either.
    """
    try:
        return await _verdict(env, submission)
    except InfraError:  # once more: what fails for a moment is nobody's fault
        return await _verdict(env, submission)


async def judge_by_witness(
    setting: Setting, submission: Submission, key: EpisodeKey
) -> tuple[EndReason, Score]:
    """The ending and the verdict of what an agent handed in earlier, by the rule of `blame`.

    Raises:
        UserError: the witness found that the environment or the task is wrong.
    """
    try:
        return submission.end, await judge(setting.build_env(), submission)
    except Exception as error:  # noqa: BLE001 - whatever it is, somebody is to blame
        return await blame(
            error,
            True,
            submission.task.threshold,
            lambda: play_witness(setting, submission.task, key),
        )


async def _verdict(env: ToolEnv, submission: Submission) -> Score:
    """What the verifier says; that it has no verdict is an error, too.

    Raises:
        InfraError: there is none.
    """
    score = await grade(env.verifier, submission, env.verifier_s)
    if score.value is None:
        raise VerifierError(score.why)
    return score


async def _attempt(
    setting: Setting, task: Task, key: EpisodeKey, progress: _Progress
) -> tuple[EndReason, Score]:
    """Play and judge.

    Raises:
        Exception: whatever broke.
    """
    end = await _act(setting, task, key, progress)
    if end is EndReason.WALL_TIME and setting.deterministic:
        limit_s = progress.env.limits.wall_s
        raise WallLimitMet(f"the wall limit of {limit_s:g} s was met in a deterministic run")
    return end, await judge(progress.env, _submission(setting, task, key, progress, end))


async def _act(setting: Setting, task: Task, key: EpisodeKey, progress: _Progress) -> EndReason:
    """Play until the conversation ends, and copy the artifacts out of the sandbox."""
    env = progress.env
    seed = derive_seed(setting.seed, key.task, key.round, key.sample)
    # Before anything is awaited: a turn-synchronous engine must know of all episodes at once.
    with setting.policy.player(task, env.limits, seed) as progress.player:
        async with borrow(env, setting.pool, task.view()) as sandbox, closing(progress.runner):
            clock = asyncio.timeout(env.limits.wall_s)
            try:
                async with clock:
                    end = await _converse(setting, task, key, progress, sandbox, clock)
            except TimeoutError:
                if not clock.expired():
                    raise
                if not progress.begun:
                    raise WallLimitMet(
                        f"the wall limit of {env.limits.wall_s:g} s was met before the first turn"
                    ) from None
                progress.acting, end = False, EndReason.WALL_TIME
            async with boundary(ToolFault, f"{env.id}: collecting artifacts"):
                await _collect(progress)
    return end


async def _collect(progress: _Progress) -> None:
    """Take the side effects and the artifacts; the former first, as that sees what still runs."""
    runner = progress.runner
    progress.side_effects = await runner.side_effects()
    progress.artifacts = await runner.collect()
    if found := runner.found(progress.history, progress.artifacts):
        progress.side_effects = {**(progress.side_effects or {}), **found}


async def _converse(
    setting: Setting,
    task: Task,
    key: EpisodeKey,
    progress: _Progress,
    sandbox: Sandbox | None,
    clock: asyncio.Timeout,
) -> EndReason:
    """Reset, then turn by turn until something ends it."""
    env, history, player = progress.env, progress.history, progress.player
    assert player is not None
    async with boundary(ToolFault, f"{env.id}: reset"):
        with waiting("the environment's reset", env.limits.wall_s):
            history += await progress.runner.reset(
                task.view(),
                seed=derive_seed(setting.seed, key.task, key.round),
                sandbox=sandbox,
                guard=setting.guard() if setting.guard else None,
            )
    progress.opening, progress.begun = len(history), True
    while True:
        progress.acting = True
        if setting.deterministic or thinking_s(player) is not None:
            async with _paused(clock):
                message, end = await _ask(setting.policy, player, history, env)
            await _charge(clock, 0.0 if setting.deterministic else thinking_s(player) or 0.0)
        else:
            message, end = await _ask(setting.policy, player, history, env)
        progress.acting = False
        history.append(message)
        if end is not None:
            return end
        async with boundary(ToolFault, f"{env.id}: step"):
            step = await progress.runner.step(message)
        history += step.messages
        if step.end is not None:
            return step.end


async def _ask(
    policy: Policy, player: Player, history: list[Message], env: ToolEnv
) -> tuple[Message, EndReason | None]:
    """The policy's next turn, with calls that no record could hold made unreadable ones.

    Raises:
        ContractError: the policy is the user's own code, and it raised or returned something else
            than a turn. Its bug is no result of the agent, so it ends the run.
        EngineError: sampling failed.
    """
    ours = isinstance(policy, _SAMPLING)
    awaited = "the engine" if isinstance(policy, TokenPolicy) else f"policy {policy.name!r}"
    try:
        with waiting(awaited):
            turn = await player.act(history, env.tools)
        if not ours:
            _check_turn(turn)
    except (AgentRLError, asyncio.CancelledError):
        raise
    except (Exception, SystemExit) as error:
        if ours:  # what a model said may have caused it: `blame` decides
            raise
        number = sum(message.role == "assistant" for message in history) + 1
        raise ContractError(
            f"policy {policy.name!r} failed in turn {number}: {type(error).__name__}: {error}"
            f"{where_raised(error, 'this policy')}"
        ) from error
    message, end = turn
    if any(isinstance(call, ToolCall) for call in message.tool_calls):
        message = replace(message, tool_calls=tuple(map(recordable, message.tool_calls)))
    return message, end


def _check_turn(turn: object) -> None:
    """Refuse what is not `(Message, EndReason | None)`.

    Raises:
        TypeError: saying what was returned.
    """
    if not (isinstance(turn, tuple) and len(turn) == 2 and isinstance(turn[0], Message)):
        raise TypeError(f"act must return (Message, EndReason or None), not {turn!r}")
    message, end = turn
    message.check_types()
    if message.role != "assistant":
        raise TypeError(f"act must return a message of the assistant, not of {message.role!r}")
    if not (end is None or isinstance(end, EndReason)):
        raise TypeError(f"act must return an EndReason or None as ending, not {end!r}")


@asynccontextmanager
async def _paused(clock: asyncio.Timeout) -> AsyncIterator[None]:
    """Stop the clock while a policy waits for other episodes, or for the server of a model."""
    loop, deadline = asyncio.get_running_loop(), clock.when()
    assert deadline is not None
    left = deadline - loop.time()
    clock.reschedule(None)
    yield
    clock.reschedule(loop.time() + left)


async def _charge(clock: asyncio.Timeout, seconds: float) -> None:
    """Let so much time be over; if that was the last, the clock ends its block here."""
    deadline = clock.when()
    assert deadline is not None
    clock.reschedule(deadline - seconds)
    if seconds:
        await asyncio.sleep(0)


def _submission(
    setting: Setting, task: Task, key: EpisodeKey, progress: _Progress, end: EndReason
) -> Submission:
    return Submission(
        task=task,
        messages=tuple(progress.history),
        end=end,
        artifacts=progress.artifacts,
        pool=setting.pool,
        seed=derive_seed(setting.seed, key.task, key.round, key.sample, "grade"),
        opening=progress.opening,
        untrusted=progress.env.untrusted,
        side_effects=progress.side_effects,
    )


def _episode(
    progress: _Progress, task: Task, key: EpisodeKey, end: EndReason, score: Score
) -> Episode:
    return Episode(
        key=key,
        env=progress.env.id,
        task=task.view(),
        start=progress.runner.start,
        messages=tuple(progress.history),
        end=end,
        score=score,
        trajectories=progress.player.trajectories if progress.player else (),
        counts=replace(progress.runner.counts(), **usage_of(progress.player)._asdict()),
        artifacts=progress.artifacts,
        side_effects=progress.side_effects,
        events=tuple(progress.runner.events),
        failure=score.why if score.value is None else "",
    )


def _unmade(setting: Setting, task: Task, key: EpisodeKey, error: BaseException) -> Episode:
    """The episode of an environment whose constructor raised: nobody has played it."""
    why = "".join(traceback.format_exception(error)) + "(raised by the environment's constructor)"
    env = str(getattr(setting.env, "id", ""))
    end, score = EndReason.TOOL_FAULT, Score.failed(why)
    return Episode(key, env, task.view(), "", (), end, score, failure=why, seed=setting.seed)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
