"""agentrl: tool-use environments, hidden-test verifiers and trajectory-level GRPO."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.lazy import lazy_names

# A checkout that lost its symbolic links still finds the four rooms beside the package.
if not (Path(__file__).parent / "envs").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from agentrl.dialogue import Dialogue as Dialogue
    from agentrl.env import Step as Step
    from agentrl.env import ToolEnv as ToolEnv
    from agentrl.errors import AgentRLError as AgentRLError
    from agentrl.errors import InfraError as InfraError
    from agentrl.errors import UserError as UserError
    from agentrl.gym import make as make
    from agentrl.registry import register as register
    from agentrl.rollout.play import play as play
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
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "dialogue": ("Dialogue",),
            "env": ("Step", "ToolEnv"),
            "errors": ("AgentRLError", "InfraError", "UserError"),
            "gym": ("make",),
            "registry": ("register",),
            "rollout.play": ("play",),
            "tools": ("tool",),
            "trajectory": ("Episode", "Group", "Segment", "Trajectory"),
            "types": ("EndReason", "Limits", "Message", "Score", "Task", "TaskView", "ToolCall"),
        },
    )

__version__ = "0.1.0"


class _GymnasiumHook(MetaPathFinder):
    """Registers our environments once gymnasium is imported, which is too slow to do here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "gymnasium.envs":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                import_module("agentrl.registry").register_gymnasium()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "gymnasium.envs" in sys.modules:
    import_module("agentrl.registry").register_gymnasium()
else:
    sys.meta_path.insert(0, _GymnasiumHook())
