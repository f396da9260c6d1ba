"""Whose fault a failed episode is.

A failed episode has no score, and what has no score is left out of every statistic: so no failure
that an agent can bring about may count as one. The rule: once anything of the agent was involved
(its words, its files, its processes), a failure is the agent's and scores as failed, unless a
witness that has nothing to do with the agent fails as well. The witness is another episode of the
same task in the same kind of sandbox, played by the oracle and judged by the same verifier; where
the engine failed, it is the opening of the episode, asked again for one token.

A grading that fails is tried once more before that (`play.judge`), since the same files can be
judged again. An episode cannot: played again, it would be a second draw for the agent.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from agentrl.aio import is_cancelled
from agentrl.env import ToolEnv
from agentrl.errors import (
    AnswerFailed,
    BackendAway,
    ContractError,
    EngineAborted,
    EngineAway,
    EngineBroken,
    EngineError,
    EngineLost,
    InfraError,
    ReplayDiverged,
    SandboxLost,
    TemplateError,
    ToolFault,
    UserError,
    VerifierError,
    WallLimitMet,
)
from agentrl.policies.base import Policy, Scripted
from agentrl.types import EndReason, Limits, Message, Score, Task, ToolSpec

CERTAIN = (BackendAway, EngineAborted, EngineAway, EngineBroken, EngineLost, ReplayDiverged)
"""Failures that no agent can bring about, so that no witness is asked; a replay is nobody's play.
"""

Play = Callable[[], Awaitable[object]]

_REASONS: dict[type[InfraError], EndReason] = {
    SandboxLost: EndReason.SANDBOX_LOST,
    EngineError: EndReason.ENGINE_ERROR,
    ToolFault: EndReason.TOOL_FAULT,
    WallLimitMet: EndReason.TIMEOUT,
    ReplayDiverged: EndReason.TOOL_FAULT,
    VerifierError: EndReason.VERIFIER_ERROR,
}


async def blame(
    error: BaseException, spoke: bool, threshold: float, witness: Play
) -> tuple[EndReason, Score]:
    """The ending and the score of an episode that raised.

    Args:
        error: what it raised.
        spoke: whether the agent had said anything by then.
        threshold: from which value on the task counts as passed; the agent's score is below it.
        witness: does the same without the agent, and raises if that fails too.

    Raises:
        UserError: the witness found that the environment or the task is wrong for every episode.
        asyncio.CancelledError: somebody asked this episode to stop.
    """
    known = isinstance(error, InfraError)
    why = str(error) or repr(error) if known else "".join(traceback.format_exception(error))
    if not _involves_agent(error, spoke):
        return reason_of(error), Score.failed(why)
    try:
        await witness()
    except UserError:
        raise
    except BaseException as witnessed:
        if is_cancelled() or not isinstance(witnessed, (Exception, SystemExit, CancelledError)):
            raise
        return reason_of(error), Score.failed(f"{why} (a witness without the agent failed too)")
    value = 0.0 if threshold > 0 else threshold - 1.0
    last = why.strip().splitlines()[-1]
    return EndReason.AGENT_FAULT, Score(
        value, {}, f"{reason_of(error).value} where a witness without the agent had none: {last}"
    )


def is_for_user(error: BaseException, spoke: bool) -> bool:
    """Whether an error says what is wrong for every episode: the run ends with its sentence.

    A ConfigError or a TaskError may also be what an environment says of an agent's words.
    """
    wrong = (ContractError, TemplateError) if spoke else (UserError,)
    return isinstance(error, wrong)


def reason_of(error: BaseException) -> EndReason:
    """The ending that a failure has where it is not the agent's."""
    found = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(found, EndReason.INTERNAL_ERROR)


def _involves_agent(error: BaseException, spoke: bool) -> bool:
    if any(isinstance(cause, CERTAIN) for cause in _causes(error)):
        return False
    return spoke or isinstance(error, AnswerFailed)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, each once: causes may go in a circle."""
    due, seen = [error], {id(error)}
    while due:
        error = due.pop()
        yield error
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        new = [each for each in (error.__cause__, *parts) if each and id(each) not in seen]
        seen.update(map(id, new))
        due += new


class Witness(Scripted):
    """The policy of a witness: plays the reference solution if the task has one, else nothing."""

    def __init__(self, env: ToolEnv) -> None:
        super().__init__("witness", lambda task: env.oracle_actions(task) if task.oracle else ())


async def answers(
    policy: Policy,
    task: Task,
    limits: Limits,
    opening: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> None:
    """Have a policy say one token to the opening, of which nothing is the agent's.

    Raises:
        EngineError: it cannot.
    """
    with policy.player(task, replace(limits, turn_tokens=1), 0) as player:
        await player.act(opening, tools)
