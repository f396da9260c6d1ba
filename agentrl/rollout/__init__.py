"""From a task to a finished episode, and from tasks to finished groups."""

from agentrl.rollout.play import Setting, derive_seed, play
from agentrl.rollout.rollouts import Rollouts

__all__ = ["Rollouts", "Setting", "derive_seed", "play"]
