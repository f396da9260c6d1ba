"""Training: from groups of episodes to gradients. Its modules import torch, this one does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.lazy import lazy_names

if __name__ == "trainers":
    raise ImportError("import agentrl.trainers, not trainers")

if TYPE_CHECKING:
    from agentrl.trainers.algorithms.recipe import Recipe as Recipe
    from agentrl.trainers.algorithms.recipes import recipe as recipe
    from agentrl.trainers.batch import PolicyOutput as PolicyOutput
    from agentrl.trainers.batch import TokenBatch as TokenBatch
    from agentrl.trainers.batch import pack as pack
    from agentrl.trainers.config import TrainConfig as TrainConfig
    from agentrl.trainers.config import read_config as read_config
    from agentrl.trainers.demo import DemoPlan as DemoPlan
    from agentrl.trainers.demo import run_demo as run_demo
    from agentrl.trainers.offline.sft import demonstrations as demonstrations
    from agentrl.trainers.offline.sft import sft as sft
    from agentrl.trainers.session import plan_training as plan_training
    from agentrl.trainers.session import run_training as run_training
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "algorithms.recipe": ("Recipe",),
            "algorithms.recipes": ("recipe",),
            "batch": ("PolicyOutput", "TokenBatch", "pack"),
            "config": ("TrainConfig", "read_config"),
            "demo": ("DemoPlan", "run_demo"),
            "offline.sft": ("demonstrations", "sft"),
            "session": ("plan_training", "run_training"),
        },
    )
