"""PPO against a reward model, as the example runs it: a planted rule, and a budget of KL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from run_cases import TOLD, Heard, run

from agentrl.errors import ConfigError
from agentrl.records.files import read_episodes, read_metrics
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import check_config, read_config
from agentrl.trainers.run import Run
from agentrl.trainers.session import train_with_display

EXAMPLES = Path(__file__).parents[3] / "examples"
BUDGET = 1.0


def gold(folder: Path) -> list[float]:
    """Share of the answers of each round that the planted rule likes."""
    rounds: dict[int, list[float]] = {}
    for one in read_episodes(folder / "episodes.jsonl").values():
        if one.key.phase == "train":
            liked = float(one.messages[-1].content.startswith("Yes "))
            rounds.setdefault(one.key.step, []).append(liked)
    return [fmean(rounds[step]) for step in sorted(rounds)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the example has run."""
    folder = tmp_path_factory.mktemp("ppo")
    command = [sys.executable, str(EXAMPLES / "05_rlhf.py"), str(EXAMPLES / "ppo_rlhf.toml")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def assert_gold_rises_within_the_budget(folder: Path, least: float = 0.8) -> None:
    rates, rows = gold(folder), read_metrics(folder / "metrics.jsonl")
    assert fmean(rates[-3:]) >= least and rates[0] < 0.7
    assert max(row["policy/ref_kl"] for row in rows) < BUDGET


def test_ppo_raises_the_gold_reward_at_a_kl_below_its_budget(played: Path) -> None:
    folder = played / "run" / "3-ppo"
    assert_gold_rises_within_the_budget(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    assert len({row["policy/kl_reward_coef"] for row in rows}) > 2, "it follows its target"
    assert "value/explained_variance" in rows[0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "least"), [("grpo", 0.65), ("rloo", 0.8), ("remax", 0.8)])
def test_the_same_reward_model_trains_other_recipes(
    name: str, least: float, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(played)
    config = read_config(played / "run" / "3-ppo" / "config.toml")
    loss = {key: value for key, value in config.loss.items() if key != "critic"}
    run(config.model_copy(update={"recipe": name, "loss": loss}), tmp_path / "run")
    assert_gold_rises_within_the_budget(tmp_path / "run", least)


def test_a_run_ends_where_its_budget_is_spent_and_can_be_gone_on_with(
    model: Path, tmp_path: Path
) -> None:
    heard = Heard()
    row = {"env": TOLD, "model": str(model), "steps": 6, "tasks_per_step": 4, "group_size": 4}
    row |= {"learning_rate": 1e-2, "deterministic": True, "save_every": 100}
    tight, wide = (
        check_config(row | {"loss": {"kl_coef": 1e-3, "ref_kl_budget": budget}}, "test")
        for budget in (1e-6, 1e6)
    )
    rows = run(tight, tmp_path / "run", events=heard)
    assert 1 <= len(rows) < 6 and rows[-1]["policy/ref_kl"] > 1e-6
    assert all(row["policy/ref_kl"] <= 1e-6 for row in rows[:-1])
    assert any(f"the run ends with round {len(rows)}" in sentence for sentence in heard.warnings)
    assert (tmp_path / "run" / "checkpoints" / f"step_{len(rows)}").is_dir()
    config = tmp_path / "run" / "config.toml"
    done = train_with_display(read_config(config), tmp_path / "run", resume=True)
    assert (done["steps"], done["trained"]) == (len(rows), 0), "as many as were played"
    heard.warnings.clear()
    assert len(run(tight, tmp_path / "run", resume=True, events=heard)) == len(rows), (
        "spent is spent"
    )
    assert any(f"the run ends with round {len(rows)}" in sentence for sentence in heard.warnings)
    assert len(run(wide, tmp_path / "run", resume=True)) == 6


@pytest.mark.parametrize(
    ("name", "options", "setting"),
    [
        ("grpo", {"ref_kl_budget": 1.0}, "loss.ref_kl_budget"),
        ("ppo", {"ref_kl_target": 1.0}, "loss.ref_kl_target"),
        ("ppo", {"kl_reward_coef": 0.0, "ref_kl_target": 1.0}, "loss.kl_reward_coef"),
    ],
)
def test_a_budget_and_a_target_need_a_reference(
    name: str, options: dict[str, float], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(name, **options)
    assert caught.value.setting == setting


def test_chat_needs_prompts_and_somebody_who_judges(model: Path, tmp_path: Path) -> None:
    config = check_config({"env": "chat-v0", "model": str(model)}, "test")
    with pytest.raises(ConfigError, match="chat-v0: prompts and reward must be set"):
        Run(config, tmp_path / "run")
