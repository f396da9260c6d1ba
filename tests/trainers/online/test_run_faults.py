"""Runs that are set up wrongly, cut off at the worst moment, or resumed with other settings. Real
tiny models.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from run_cases import TOYS, Heard, run, timeless

from agentrl.curriculum.source import EnvPart
from agentrl.errors import ConfigError
from agentrl.records.files import iter_episodes, read_metrics
from agentrl.trainers import learner, session
from agentrl.trainers.config import check_config
from agentrl.trainers.folder import latest_checkpoint
from agentrl.trainers.loop import train
from agentrl.trainers.observe import metrics
from agentrl.trainers.run import Run
from agentrl.trainers.session import run_training
from agentrl.types import Score

PAGE = Path(__file__).resolve().parents[3] / "docs" / "trainers.md"


def settings(model, **changes):
    row = {
        "env": f"{TOYS}:Parity",
        "model": str(model),
        "steps": 4,
        "tasks_per_step": 3,
        "group_size": 4,
        "learning_rate": 1e-2,
        "deterministic": True,
        "save_every": 1,
        "minibatches": 2,
    }
    return check_config(row | changes, "test")


# --- set up wrongly


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipe": "grop"}, "there is no recipe 'grop'"),
        ({"group_size": 1}, "group_size=1"),
        (
            {"loss": {"kl_coef": 0.1, "reset_every": 2}, "compute": {"lora_rank": 2}},
            "reset_every needs a reference",
        ),
        ({"tasks_per_step": 41, "eval_every": 1}, "fewer than the 41 of one round"),
        ({"recipe": "ppo", "loss": {"critic": {"model": "nowhere"}}}, "nowhere"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_played_or_written(
    model, tmp_path, change, sentence
):
    heard = Heard()
    with pytest.raises(ConfigError, match=sentence):
        run(settings(model, **change), tmp_path / "a", events=heard)
    assert not heard.phases and not heard.warnings and not (tmp_path / "a").exists()


def test_a_wrong_tracker_leaves_the_run_folder_free(model, tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text(
        f'env = "{TOYS}:Parity"\nmodel = "{model}"\nsteps = 1\ntasks_per_step = 2\ngroup_size = 2\n'
    )
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        run_training(toml, tmp_path / "r", log_to=["tensorbord"])
    run_training(toml, tmp_path / "r")


def test_a_policy_that_would_never_learn_is_warned_of(model, tmp_path):
    heard = Heard()
    config = settings(model, recipe="vapo", steps=1)
    Run(config, tmp_path / "a", events=heard).close()
    assert any("loss.critic.warmup=50" in sentence for sentence in heard.warnings)


def test_nothing_held_out_is_no_evaluation(model, tmp_path, monkeypatch):
    tasks = EnvPart.tasks

    def only_train(self, split, seed):
        return iter(()) if split == "test" else tasks(self, split, seed)

    monkeypatch.setattr(EnvPart, "tasks", only_train)
    with pytest.raises(ConfigError, match="no task in split 'test': set eval_every=0"):
        Run(settings(model, eval_every=1), tmp_path / "a")
    Run(settings(model), tmp_path / "b").close()


def test_process_rewards_are_numbers():
    with pytest.raises(ValueError, match="process rewards must be finite, not format="):
        Score(1.0, turns={"format": (0.0, float("nan"))})


# --- cut off and resumed


@pytest.mark.parametrize("changed", [{"lora_rank": 4}, {"lora_alpha": 8}, {"lora_rank": 0}])
def test_what_was_trained_cannot_be_another_thing_on_resume(model, tmp_path, changed):
    """Adapters of a run without them would begin again from the first model, silently."""
    first = {"lora_rank": 0} if changed.get("lora_rank") else {"lora_rank": 2}
    run(settings(model, compute=first, steps=1), tmp_path / "a")
    with pytest.raises(ConfigError, match=f"is a run with compute.{next(iter(changed))}="):
        Run(settings(model, compute=first | changed), tmp_path / "a", resume=True)
    other = settings(model, compute=first, optimizer={"name": "adamw8bit"})
    with pytest.raises(ConfigError, match=r"is a run with optimizer\.name='adamw'"):
        Run(other, tmp_path / "a", resume=True)


WORST = {
    "recipe": "ppo",
    "group_size": 2,
    "loss": {"kl_coef": 0.01, "reset_every": 2, "refill": True, "critic": {"warmup": 1}},
}


@pytest.mark.bit_equal
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_critic_reset_reference_and_refill_resume_bit_for_bit(model, tmp_path, dtype):
    change = WORST | {"compute": {"dtype": dtype}}
    whole = run(settings(model, **change), tmp_path / "a" / "x")
    run(settings(model, **change, steps=3), tmp_path / "b" / "x")
    assert (tmp_path / "b/x/checkpoints/step_3/reference").is_dir()
    assert run(settings(model, **change), tmp_path / "b" / "x", resume=True) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_reference_follows_the_policy_and_resumes_bit_for_bit(model, tmp_path, dtype):
    loss = {"kl_coef": 0.01, "reference_decay": 0.5}
    change = {"loss": loss, "eval_every": 0, "compute": {"dtype": dtype}, "learning_rate": 1e-2}
    with Run(settings(model, **change, steps=4), tmp_path / "a" / "x") as opened:
        before = {name: w.clone() for name, w in opened.learner.reference.named_parameters()}
        opened.learner._move_reference(1)
        reference = dict(opened.learner.reference.named_parameters())
        assert all(torch.equal(before[name], w) for name, w in reference.items()), "nothing moved"
        train(opened)
        now = dict(opened.learner.model.named_parameters())
        moved = [name for name, w in reference.items() if not torch.equal(before[name], w)]
        assert moved and reference[moved[0]].dtype == torch.float32
        gaps = [
            sum(float((now[name] - old[name]).detach().norm()) for name in moved)
            for old in (before, reference)
        ]
        assert 0 < gaps[1] < gaps[0], "it is behind the policy, and not where that began"
    run(settings(model, **change, steps=2), tmp_path / "b" / "x")
    found = run(settings(model, **change, steps=4), tmp_path / "b" / "x", resume=True)
    assert found == timeless(tmp_path / "a/x")
    with pytest.raises(ConfigError, match="reference_decay needs a reference of its own"):
        Run(settings(model, **change | {"compute": {"lora_rank": 2}}), tmp_path / "c")


@pytest.mark.parametrize("at", ["save_pretrained", "torch.save", "rename", "rmtree"])
def test_a_crash_within_a_checkpoint_loses_nothing(model, tmp_path, monkeypatch, at):
    """As a kill at that very moment: the exception passes through everything but `finally`."""
    whole = run(settings(model, **WORST), tmp_path / "a" / "x")

    def cut(original, when):
        calls = Counter()

        def crash(*args, **options):
            calls["all"] += 1
            if calls["all"] == when:
                raise KeyboardInterrupt
            return original(*args, **options)

        return crash

    places = {
        "save_pretrained": (learner, "save_policy", 3),
        "torch.save": (torch, "save", 6),
        "rename": (Path, "rename", 3),
        "rmtree": (shutil, "rmtree", 8),
    }
    owner, name, when = places[at]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, cut(getattr(owner, name), when))
        run(settings(model, **WORST), tmp_path / "b" / "x")
    assert 0 < latest_checkpoint(tmp_path / "b" / "x").step < 4
    assert run(settings(model, **WORST), tmp_path / "b" / "x", resume=True) == whole


@pytest.mark.parametrize(("save_every", "begins"), [(2, "after round 2"), (9, "from the start")])
def test_who_interrupts_a_run_is_told_where_it_goes_on(
    model, tmp_path, monkeypatch, capsys, save_every, begins
):
    def stop(opened):
        played = Run.play

        def play(self, step):
            if step == 3:
                raise KeyboardInterrupt
            return played(self, step)

        monkeypatch.setattr(Run, "play", play)
        train(opened)

    monkeypatch.setattr(session, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        session.train_with_display(settings(model, save_every=save_every), tmp_path / "x")
    said = f"interrupted after round 3; the same command with --resume continues {begins}"
    assert said in capsys.readouterr().err
    assert (tmp_path / "x/report.html").exists()


def test_what_is_put_aside_for_readers_is_there_once_after_a_resume(model, tmp_path):
    folder = tmp_path / "b" / "x"
    run(settings(model, steps=3, save_every=2), folder)
    for last in (folder / "checkpoints").glob("step_3*"):
        last.rename(tmp_path / "lost")
    run(settings(model, save_every=2), folder, resume=True)
    for kind in ("top", "random"):
        keys = Counter(
            episode.key for episode in iter_episodes(folder / "samples" / f"{kind}.jsonl")
        )
        assert {key.step for key in keys} == {0, 1, 2, 3} and set(keys.values()) == {1}


# --- metrics that tell what happened


def test_a_step_that_the_budget_skips_trains_nothing(model, tmp_path):
    change = {"steps": 1, "minibatches": 3}
    free, bound = (
        run(settings(model, **change, loss={"kl_budget": budget}), tmp_path / str(budget))[0]
        for budget in (1e3, 1e-7)
    )
    assert free["policy/updates"] == 3 and free["episodes/untrained"] == 0
    assert bound["policy/updates"] == 1 and bound["episodes/untrained"] == pytest.approx(2 / 3)


def test_shares_of_the_gradient_weigh_by_corrections(model, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(metrics, "gradient_metrics", lambda trained: heard.extend(trained) or {})
    run(settings(model, steps=1, loss={"entropy_share": 0.1}), tmp_path / "a")
    assert len(heard) == 2 and all((part.weights_BT == 0)[part.mask_BT].any() for part in heard)


def test_greedy_episodes_are_rollouts_where_time_is_told(model, tmp_path, monkeypatch):
    pack = Run.pack

    def slowly(*round_of):
        time.sleep(0.5)
        return pack(*round_of)

    monkeypatch.setattr(Run, "pack", slowly)
    run(settings(model, recipe="remax", steps=1), tmp_path / "a")
    (row,) = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert row["time/rollout_s"] >= 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"loss": {"kl_coef": 0.1, "tis_high": 2.0, "entropy_coef": 0.01}, "eval_every": 1},
        {"recipe": "ppo", "loss": {"critic": {"warmup": 1}}},
        {"recipe": "dapo", "group_size": 2},
    ],
)
def test_every_metric_of_a_run_stands_in_the_docs(model, tmp_path, change):
    names = re.findall(r"`([a-z_]+/[^`\s]+)`", PAGE.read_text())
    known = re.compile("|".join(re.sub(r"<\w+>", ".+", name.replace(".", r"\.")) for name in names))
    found = {
        name for row in run(settings(model, **change, steps=2), tmp_path / "a") for name in row
    } - {"step"}
    assert not {name for name in found if not known.fullmatch(name)}
