"""From a task to a finished episode, and from tasks to finished groups."""

from agentrl.rollout.play import Setting, derive_seed, play
from agentrl.rollout.rollouts import Dispatch, GroupStream, Handle, Rollouts

__all__ = ["Dispatch", "GroupStream", "Handle", "Rollouts", "Setting", "derive_seed", "play"]
