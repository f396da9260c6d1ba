"""Every failure has a name, after the border it crossed.

    AgentRLError
    ├── UserError            bad input: one sentence with field, value and fix; exit code 2
    │   ├── ConfigError          a setting or a command-line value
    │   ├── TaskError            a task row that cannot be admitted
    │   ├── ContractError        an environment, sandbox or verifier breaks its contract
    │   │   ├── NoSandbox            an environment uses a sandbox and does not ask for one
    │   │   └── Unrecordable         a record holds what JSON cannot say
    │   └── TemplateError        a chat template that cannot carry exact tokens
    ├── TrainingError        training cannot go on
    └── InfraError           no score, unless the agent is to blame: see `agentrl.rollout.blame`
        ├── SandboxLost          the place where code runs is gone
        │   └── BackendAway          no sandbox can be had, or somebody outside ended this one
        ├── ChildLost            the process that plays the episodes ended or hangs
        ├── EngineError          sampling failed
        │   ├── EngineAborted        somebody stopped the request
        │   ├── EngineAway           the server cannot be reached, or has no room
        │   ├── EngineLost           the engine's process ended; another one is started
        │   ├── EngineBroken         the engine contradicts itself
        │   └── AnswerFailed         the server failed at its answer, perhaps because of its text
        ├── ToolFault            a tool's own code is broken beyond answering the agent
        ├── WallLimitMet         a limit of the clock was met where it may not decide
        ├── ReplayDiverged       an environment answers a recorded episode otherwise than then
        └── VerifierError        the judge failed, so there is no verdict

A tool that raises, a command that exits 1, malformed JSON from the model: these are *values*, which
the agent sees as an observation. Only what is listed here travels as an exception.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class AgentRLError(Exception):
    """Root of every error that this library raises on purpose."""


class UserError(AgentRLError):
    """Bad input: one sentence that names the setting, its value and the fix.

    Attributes:
        setting: dotted name of the setting at fault, as in "loss.clip_high"; None if there is none.
            Tests and tools read it instead of the sentence.
    """

    def __init__(self, message: str = "", *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException pickles only `args`; the setting must survive the way to another process.
        return (type(self), self.args, self.__dict__)


class ConfigError(UserError):
    """A setting, an identifier or a command-line value is wrong."""


class TaskError(UserError):
    """A task row cannot be admitted; the message names the file and line, or the task id."""


class ContractError(UserError):
    """An environment, sandbox or verifier breaks the contract of its room."""


class NoSandbox(ContractError):
    """An environment uses a sandbox and does not say that it needs one."""


class Unrecordable(ContractError):
    """A record holds what cannot be written as JSON."""


class TemplateError(UserError):
    """A chat template or tokenizer cannot carry exact tokens."""


class TrainingError(AgentRLError):
    """Training cannot go on; the message says why and what to do."""


class InfraError(AgentRLError):
    """A part around the agent failed."""


class SandboxLost(InfraError):
    """The sandbox died, stopped answering, or spoke out of protocol."""


class BackendAway(SandboxLost):
    """No sandbox can be had, or this one was ended from outside, which no agent can do."""


class ChildLost(InfraError):
    """The process that plays the episodes ended, or gives no sign of life."""


class EngineError(InfraError):
    """The engine could not sample."""


class EngineAway(EngineError):
    """The server cannot be reached or has no room, whatever it is asked."""


class EngineAborted(EngineError):
    """Somebody stopped the request, or the whole engine."""


class EngineLost(EngineError):
    """The process of the engine ended before it had answered; another one takes its place."""


class EngineBroken(EngineError):
    """The engine contradicts itself, whatever the text was."""


class AnswerFailed(EngineError):
    """The server failed at its answer, so the text of that answer may be the reason."""


class ToolFault(InfraError):
    """An environment's own code failed outside of a tool call, as in reset or prompt."""


class WallLimitMet(InfraError):
    """A limit of the clock was met where it must not decide a reward: in a deterministic run, or
    before the first turn.
    """


class ReplayDiverged(InfraError):
    """A recorded episode cannot be played again: its environment answered otherwise this time."""


class VerifierError(InfraError):
    """The verifier could not reach a verdict."""


@asynccontextmanager
async def boundary(error: type[InfraError], what: str) -> AsyncIterator[None]:
    """Name whatever escapes the block after its border; errors that have a name pass.

    Raises:
        error: any other exception, with `what` and the cause in its message.
    """
    try:
        yield
    except AgentRLError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
