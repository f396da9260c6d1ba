"""Engines: token ids in, token ids with their log-probabilities out, weights in."""

from agentrl.engines.base import Engine, Generation, Sampling, Weights

__all__ = ["Engine", "Generation", "Sampling", "Weights"]
