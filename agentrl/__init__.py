"""agentrl: tool-use environments, hidden-test verifiers and trajectory-level GRPO for language-model agents."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A checkout that lost its symbolic links still finds the four rooms beside the package.
if not (Path(__file__).parent / "envs").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from agentrl.env import Step as Step
    from agentrl.env import ToolEnv as ToolEnv
    from agentrl.errors import AgentRLError as AgentRLError
    from agentrl.errors import InfraError as InfraError
    from agentrl.errors import UserError as UserError
    from agentrl.registry import make as make
    from agentrl.registry import register as register
    from agentrl.rollout import play as play
    from agentrl.tools import tool as tool
    from agentrl.trajectory import Episode as Episode
    from agentrl.trajectory import Group as Group
    from agentrl.trajectory import Segment as Segment
    from agentrl.trajectory import Trajectory as Trajectory
    from agentrl.types import EndReason as EndReason
    from agentrl.types import Limits as Limits
    from agentrl.types import Message as Message
    from agentrl.types import Score as Score
    from agentrl.types import Task as Task
    from agentrl.types import TaskView as TaskView
    from agentrl.types import ToolCall as ToolCall

_HOMES = {
    "AgentRLError": "errors",
    "EndReason": "types",
    "Episode": "trajectory",
    "Group": "trajectory",
    "InfraError": "errors",
    "Limits": "types",
    "Message": "types",
    "Score": "types",
    "Segment": "trajectory",
    "Step": "env",
    "Task": "types",
    "TaskView": "types",
    "ToolCall": "types",
    "ToolEnv": "env",
    "Trajectory": "trajectory",
    "UserError": "errors",
    "make": "registry",
    "play": "rollout",
    "register": "registry",
    "tool": "tools",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the table above is the one list of public names
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(f"agentrl.{_HOMES[name]}"), name)
