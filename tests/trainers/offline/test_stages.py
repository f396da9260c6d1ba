"""Stages as a user runs them: from a TOML file to a model, on planted preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import last_json
from preference_cases import JUDGE, app, planted_pairs, tiny_policy, write_rows
from reward_cases import ranked

from agentrl.engines.loading import load_model, refuse_other_tokenizer
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import read_metrics
from agentrl.trainers.offline.files import read_examples
from agentrl.trainers.offline.preference import PreferenceStage
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import run_stage
from agentrl.trainers.pipeline import run_offline
from agentrl.verifiers import RewardModel
from agentrl.verifiers.models.reward_service import RewardStore


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, and a model that says yes as often as no."""
    folder = tmp_path_factory.mktemp("world")
    pairs = planted_pairs()
    write_rows(folder / "pairs.jsonl", pairs)
    answers = [
        {"prompt": r["prompt"], "response": r[k]} for r in pairs for k in ("chosen", "rejected")
    ]
    write_rows(folder / "answers.jsonl", answers)
    (folder / "rule.py").write_text(JUDGE)
    more = {"epochs": 16, "learning_rate": 1e-2, "card": {"prompts": 0}}
    settings = stage(folder, "sft", "answers.jsonl", **more)
    found = run_stage(settings, folder / "sft")
    assert found["after"]["nll"] < 0.5 < found["before"]["nll"]
    return folder


def stage(folder: Path, kind: str, file: str = "pairs.jsonl", **more: Any) -> StageSettings:
    row = {
        "stage": kind,
        "model": str(warm(folder)) if (folder / "sft/stage.json").exists() else tiny_policy(),
        "data": {"files": [str(folder / file)], "held_out": 0.25},
        "schedule": {"warmup": 2, "final": 0.1},
        "learning_rate": 1e-3,
        "epochs": 2,
    }
    return StageSettings.model_validate(row | more)


def warm(folder: Path) -> Path:
    (model,) = (folder / "sft" / "checkpoints").glob("step_*/model")
    return model


@pytest.mark.parametrize(
    ("objective", "rate", "epochs"),
    [
        ("dpo", 1e-3, 8),
        ("kto", 1e-3, 4),
        ("orpo", 5e-3, 4),
        pytest.param("ipo", 1e-3, 8, marks=pytest.mark.long),
        pytest.param("simpo", 1e-3, 8, marks=pytest.mark.long),
    ],
)
def test_planted_preferences_are_learnt(
    objective: str, rate: float, epochs: int, world: Path, tmp_path: Path
) -> None:
    card = {"judge": f"{world / 'rule.py'}:polite", "max_tokens": 24}
    more = {"objective": objective, "learning_rate": rate, "card": card, "epochs": epochs}
    found = run_stage(stage(world, "preference", **more), tmp_path / "run")
    assert found["after"]["margin"] > 1 and found["after"]["accuracy"] >= 0.95
    assert found["card"]["judge"]["after"] >= 0.9 > found["card"]["judge"]["before"]
    assert abs(found["before"]["margin"]) < 1e-4 and found["card"]["kl"] > 0
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["step"] > 1


@pytest.mark.parametrize("heads", [1, 3])
def test_a_reward_model_learns_them_and_serves_as_a_verifier(
    heads: int, world: Path, tmp_path: Path
) -> None:
    settings = stage(world, "reward", reward={"heads": heads}, epochs=6, learning_rate=3e-3)
    found = run_stage(settings, tmp_path / "run")
    assert found["after"]["accuracy"] >= 0.95 and found["after"]["calibration"] < 0.3
    judge = RewardModel.load(found["model"])
    rows = [judge.encode((read["prompt"], read["said"])) for read in talks()]
    yes, no = (judge.together(one) for one in judge._batches.forward(rows))
    assert yes > no
    held_out, _ = read_examples([tmp_path / "run" / "held_out.jsonl"], "pairs")
    assert len(held_out) == found["data"]["held_out_rows"] > 0
    assert RewardStore(tmp_path / "s").publish(found["model"], ranked(held_out)).accuracy >= 0.95


def talks() -> list[dict[str, Any]]:
    from agentrl.types import Message

    row = planted_pairs()[0]
    return [
        {"prompt": Message.user(row["prompt"]), "said": Message.assistant(row[side])}
        for side in ("chosen", "rejected")
    ]


def test_a_reward_model_reads_at_its_end_what_it_read_in_training(world: Path) -> None:
    """The trap of the score's position: rows of training are those of the verifier."""
    from agentrl.engines.factory import open_chat
    from agentrl.trainers.offline.examples import read_row
    from agentrl.trainers.offline.reward import RewardStage

    reward = RewardStage(stage(world, "reward"))
    model = reward.new_model(0)
    judge = RewardModel(model, open_chat(warm(world)).tokenizer)
    (pair,) = read_row(planted_pairs()[0])
    (row,) = reward.encode(open_chat(warm(world)), pair)
    whole = (talks()[0]["prompt"], talks()[0]["said"])
    assert row.chosen.ids == judge.encode(whole)
    with torch.no_grad():
        states = model.model(torch.tensor([row.chosen.ids])).last_hidden_state
        at_end = model.score(states)[0, -1].item()
    padded = judge._batches.forward([row.chosen.ids, (*row.chosen.ids, 5, 6, 7)])[0][0]
    assert padded == pytest.approx(at_end, abs=1e-5)


def test_the_best_of_own_answers_are_imitated(world: Path, tmp_path: Path) -> None:
    judge = f"{world / 'rule.py'}:polite"
    sample = {"answers": 4, "max_tokens": 24, "judge": judge}
    card = {"judge": judge, "max_tokens": 24}
    settings = stage(world, "sft", sample=sample, card=card, learning_rate=3e-3, epochs=4)
    found = run_stage(settings, tmp_path / "run")
    assert found["card"]["judge"]["after"] > found["card"]["judge"]["before"]
    assert 0 < found["data"]["sampled_pairs"] <= 45


def test_adapters_start_from_the_model_that_is_named(world: Path, tmp_path: Path) -> None:
    """The trap of a reference that forgets what supervised training taught."""
    more = {"compute": {"lora_rank": 2}, "steps": 1, "epochs": 1, "card": {"prompts": 0}}
    found = run_stage(stage(world, "preference", **more), tmp_path / "run")
    assert found["before"]["margin"] == pytest.approx(0, abs=1e-5) and found["steps"] == 1
    merged, start = load_model(found["model"]), load_model(warm(world))
    gaps = [
        (a - b).abs().max().item()
        for a, b in zip(merged.parameters(), start.parameters(), strict=True)
    ]
    assert max(gaps) < 1e-2


LORA = {"compute": {"lora_rank": 2}, "learning_rate": 5e-2}


def test_new_adapters_are_drawn_from_the_seed(world: Path, tmp_path: Path) -> None:
    def losses(kind: str, seed: int, noise: int) -> list[float]:
        torch.manual_seed(noise)
        more = {"seed": seed, "steps": 3, "card": {"prompts": 0}} | LORA
        run = tmp_path / f"{kind}-{seed}-{noise}"
        run_stage(stage(world, kind, **more), run)
        return [row["train/loss"] for row in read_metrics(run / "metrics.jsonl")]

    assert losses("sft", 0, 1) == losses("sft", 0, 2)
    assert losses("preference", 0, 1) == losses("preference", 0, 2) != losses("preference", 5, 1)


@pytest.mark.parametrize("batch", [16, 8])
def test_every_row_trains_once_an_epoch(
    batch: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "few.jsonl", planted_pairs()[:10])
    more = {"batch_size": batch, "micro_rows": 4, "epochs": 1, "card": {"prompts": 0}}
    settings = stage(world, "preference", objective="simpo", **more)
    data = settings.data.model_copy(update={"files": [path], "held_out": 0})
    trained: list[tuple[int, ...]] = []
    score = PreferenceStage.pair_scores

    def seen(self: PreferenceStage, model: Any, inputs: Any) -> Any:
        for row, own in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
            trained.append(tuple(row[own].tolist()))
        return score(self, model, inputs)

    monkeypatch.setattr(PreferenceStage, "pair_scores", seen)
    run_stage(settings.model_copy(update={"data": data}), tmp_path / "run")
    assert len(trained) == len(set(trained)) == 20


@pytest.mark.parametrize(
    "more",
    [
        {},
        LORA,
        {"objective": "kto"} | LORA,
        {"objective": "simpo"} | LORA,
        {"objective": "beta_dpo", "loss": {"alpha": 2.0}, "learning_rate": 1e-2},
        {"stage": "sft"} | LORA,
    ],
)
def test_an_interrupted_stage_goes_on_and_ends_alike(
    more: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    often = {"save_every": 2, "log_every": 3, "steps": 5, "card": {"prompts": 0}}
    settings = stage(world, "preference", **often | more)
    whole = run_stage(settings, tmp_path / "whole")

    def stop(row: Any) -> None:
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(settings, tmp_path / "cut", listen=stop)
    with pytest.raises(ConfigError, match="continue it with --resume"):
        run_stage(settings, tmp_path / "cut")
    again = run_stage(settings, tmp_path / "cut", resume=True)
    assert again["after"] == pytest.approx(whole["after"], abs=1e-6)
    losses = [
        [row["train/loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "cut")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and len(losses[0]) == 5
    assert run_stage(settings, tmp_path / "cut", resume=True) == again


@pytest.mark.parametrize("torn", ["", '{"global_st'])
def test_a_checkpoint_that_was_being_written_is_left_out(
    torn: str, world: Path, tmp_path: Path
) -> None:
    settings = stage(world, "sft", save_every=2, log_every=5, steps=5, card={"prompts": 0})

    def stop(row: Any) -> None:
        if row["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(settings, tmp_path / "cut", listen=stop)
    (newest,) = (tmp_path / "cut/resume").glob("checkpoint-*")
    assert newest.name == "checkpoint-4"
    newest.with_name("checkpoint-5").mkdir()
    if torn:
        (newest.with_name("checkpoint-5") / "trainer_state.json").write_text(torn)
    again = run_stage(settings, tmp_path / "cut", resume=True)
    whole = run_stage(settings, tmp_path / "whole")
    assert again["after"] == pytest.approx(whole["after"], abs=1e-6)
    rows = read_metrics(tmp_path / "cut/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"objective": "dpoo"}, "objective='dpoo' is unknown"),
        ({"objective": "orpo", "micro_rows": 4}, "reads its whole batch, so set micro_rows=0"),
        ({"objective": "kto", "batch_size": 1}, "give 2 or more"),
        ({"objective": "kto", "data": {"files": ["one.jsonl"], "held_out": 0}}, "got 1 row"),
        ({"card": {"judge": "nowhere.py:f"}}, "there is no such file"),
        ({"data": {"files": ["x"], "max_tokens": 9999}}, "does not exist"),
        pytest.param(
            {"compute": {"device": "cuda"}},
            "PyTorch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here"),
        ),
    ],
)
def test_wrong_settings_stop_before_training(
    more: dict[str, Any],
    said: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    one = {"prompt": "a", "response": "b", "label": True}
    write_rows(tmp_path / "one.jsonl", [one, one | {"response": "long " * 99, "label": False}])
    with pytest.raises(UserError, match=said):
        run_stage(stage(world, "preference", **more), tmp_path / "run")
    assert not (tmp_path / "run/config.toml").exists()


def test_the_program_runs_a_stage(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "dpo.toml"
    config.write_text(
        f'stage = "preference"\nmodel = "{warm(world)}"\nsteps = 1\n'
        f'data = {{files = ["{world / "pairs.jsonl"}"]}}\ncard = {{prompts = 0}}\n'
    )
    assert app("train", config, "--out", tmp_path / "run", "--json") == 0
    found = last_json(capsys.readouterr().out)
    assert found["steps"] == 1 and Path(found["model"], "config.json").exists()
    assert app("train", config, "--out", tmp_path / "run") == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert app("train", config, "--out", tmp_path / "b", "--set", "heads=3") == 2
    assert "did you mean 'reward.heads'?" in capsys.readouterr().err
    assert app("train", config, "--out", tmp_path / "b", "--plan") == 2
    assert "--plan is for online training" in capsys.readouterr().err


def test_a_reward_model_of_another_tokenizer_is_no_critic(model: Path) -> None:
    refuse_other_tokenizer(tiny_policy(), tiny_policy(), "loss.critic.model")
    with pytest.raises(ConfigError, match=r"\(\d+ tokens\) is not that of the policy .*: \d+ of"):
        refuse_other_tokenizer(tiny_policy(), model, "loss.critic.model")


RECIPE = """
model = "{model}"
steps = 1
data = {{files = ["{pairs}"]}}
card = {{prompts = 4, max_tokens = 8}}

[[stages]]
name = "reward"
stage = "reward"

[[stages]]
name = "best"
stage = "sft"
sample = {{answers = 3, max_tokens = 16, judge = "{{reward}}"}}

[[stages]]
name = "play"
stage = "play"
env = "calc-v0"
tasks = 2
samples = 2

[[stages]]
name = "turns"
stage = "label"
run = "{{play.run}}"
completions = 1

[[stages]]
name = "judge"
stage = "process_reward"
data = {{files = ["{{turns.run}}/labels.jsonl"]}}

[[stages]]
name = "grpo"
stage = "online"
process_rewards = {{progress = "{{judge}}"}}
loss = {{turn_weights = {{progress = 1.0}}}}
env = "calc-v0"
steps = 1
tasks_per_step = 1
group_size = 2

[[stages]]
name = "align"
stage = "preference"
"""


def test_a_recipe_hands_each_model_on_and_resumes_at_its_borders(
    world: Path, tmp_path: Path
) -> None:
    config = tmp_path / "recipe.toml"
    text = RECIPE.format(model=warm(world), pairs=world / "pairs.jsonl")
    config.write_text(text)
    with pytest.raises(ConfigError, match="begun with another recipe"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run/recipe.toml").write_text("model = 'another'\n")
        run_offline(config, tmp_path / "run", resume=True)
    folder = tmp_path / "runs"
    broken = ["align.objective=dpo", f"card.judge={world / 'nowhere.py'}:f"]
    with pytest.raises(ConfigError, match="there is no such file"):
        run_offline(config, folder, overrides=[*broken])
    folder = tmp_path / "chain"
    found = run_offline(config, folder)
    names = [one["name"] for one in found["stages"]]
    assert names == ["reward", "best", "play", "turns", "judge", "grpo", "align"]
    best, grpo, align = (found["stages"][at] for at in (1, 5, 6))
    labels = found["stages"][3]["label"]
    assert labels["n_turns"] >= labels["n_episodes"] == 4
    settings = [Path(one["run"], "config.toml").read_text() for one in (best, grpo, align)]
    assert str(warm(world)) in settings[0] and found["stages"][0]["model"] in settings[0]
    assert best["model"] in settings[1] and grpo["model"] in settings[2]
    assert found["model"] == align["model"] and align["card"]["length"]["after"] > 0
    (folder / "7-align/stage.json").unlink()
    again = run_offline(config, folder, resume=True)
    assert [one["model"] for one in again["stages"]] == [one["model"] for one in found["stages"]]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{reward}", "{rewards}", "'{rewards}' names no earlier stage"),
        ('name = "best"', 'name = "reward"', "give each a name of its own"),
        ("samples = 2", "episodes = 2", "setting 'episodes' is unknown"),
        ('stage = "preference"', "", "stage 'align' has no kind"),
        ("steps = 1\ndata", "stepz = 1\ndata", "'stepz' is unknown to every kind"),
    ],
)
def test_a_wrong_recipe_stops_before_its_first_stage(
    old: str, new: str, said: str, world: Path, tmp_path: Path
) -> None:
    text = RECIPE.format(model=warm(world), pairs=world / "pairs.jsonl").replace(old, new)
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        run_offline(tmp_path / "recipe.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()
