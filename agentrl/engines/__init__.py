"""Engines: token ids in, token ids with their log-probabilities out."""

from agentrl.engines.base import Engine, Generation, Sampling

__all__ = ["Engine", "Generation", "Sampling"]
