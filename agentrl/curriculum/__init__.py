"""Which tasks are played next. A curriculum is a `TaskSource` that learns from what was played."""

from agentrl.curriculum.source import Observed, TaskSource, Uniform

__all__ = ["Observed", "TaskSource", "Uniform"]
