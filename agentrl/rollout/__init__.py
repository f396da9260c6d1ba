"""From a task to a finished episode, and from tasks to finished groups."""

from agentrl.rollout.play import Setting, derive_seed, play
from agentrl.rollout.rollouts import Handle, Rollouts, Sampler

__all__ = ["Handle", "Rollouts", "Sampler", "Setting", "derive_seed", "play"]
