"""Two reward models, and a store with one version."""

from __future__ import annotations

import shutil

import pytest
from reward_cases import ranked_pairs, reward_folder

from agentrl.verifiers.models.reward_service import RewardStore


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two reward models of one tokenizer."""
    place = tmp_path_factory.mktemp("models")
    return [reward_folder(place / name, seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="module")
def published(models, tmp_path_factory):
    """A store with one version."""
    folder = tmp_path_factory.mktemp("stores") / "rewards"
    RewardStore(folder).publish(models[0], ranked_pairs())
    return folder


@pytest.fixture
def store(published, tmp_path):
    """A copy of it."""
    return RewardStore(shutil.copytree(published, tmp_path / "rewards"))
