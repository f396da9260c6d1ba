"""`trainers/grpo.py` computes what a training run computes, bit for bit, and is short."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_cases import PARITY, TOYS, run, settings
from trainer_cases import branch, episode

from agentrl.chat.parsers import FORMATTERS
from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.errors import ConfigError
from agentrl.policies.base import Scripted
from agentrl.registry import factory
from agentrl.rollout.play import Setting, derive_seed
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers import grpo
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import pack
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.offline.sft import collate, demonstrations
from agentrl.trajectory import Group
from agentrl.types import EndReason

FILE = Path(grpo.__file__)
BREAKING = f"{TOYS}:Breaking"
SMALL = {"operations": 1, "largest": 10}
TOY = {"tasks_per_step": 4, "group_size": 4, "learning_rate": 1e-2, "steps": 4}
SPLIT = {"minibatches": 2, "micro_tokens": 600, "temperature": 0.9}


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """A tiny policy that has seen the first tasks of calc-v0 solved, and solves some of them."""
    make = factory("calc-v0", **SMALL)
    tasks = make().tasks("train", derive_seed(0, "train", 0))
    rollouts = Rollouts(Setting(make, Scripted("oracle", make().oracle_actions)))
    groups = rollouts.gather(list(itertools.islice(tasks, 12)), 0)
    rollouts.close()
    played = [one for group in groups for one in group.episodes]
    said = [FORMATTERS["hermes"](m.content, m.tool_calls) for one in played for m in one.messages]
    folder = tmp_path_factory.mktemp("calculator")
    build_model(folder, build_tokenizer(said), width=64, layers=1, context=256)
    model, chat = load_model(folder), Chat(load_tokenizer(folder))
    shown = demonstrations(played, chat, make().tools)
    rows = collate([{"ids": row.ids, "mask": row.mask} for row in shown], 0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(50):
        model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def real(model, folder, **changes):
    """The rows of a run's metrics, and the weights it ends with."""
    micro_tokens = changes.pop("micro_tokens", 16384)
    config = settings(model, eval_every=0, compute={"micro_tokens": micro_tokens}, **changes)
    rows = run(config, folder)
    weights = load_model(folder / f"checkpoints/step_{config.steps}/model").state_dict()
    return SimpleNamespace(rows=rows, weights=weights)


def copied(model, train=grpo.train, **changes):
    """The same of the reading copy; means are over the updates of a round that had a gradient."""
    updates, rows = [], []
    weights = train(grpo.Settings(model=str(model), **changes), updates.append).state_dict()
    for step, of_round in itertools.groupby(updates, key=lambda update: update["step"]):
        round_ = list(of_round)
        taken = [update for update in round_ if update["grad_norm"]]
        row = {"step": step, "reward/mean": round_[0]["reward"], "policy/updates": len(taken)}
        for name in ("loss", "grad_norm") if taken else ():
            row[f"policy/{name}"] = sum(update[name] for update in taken) / len(taken)
        rows.append(row)
    return SimpleNamespace(rows=rows, weights=weights)


def assert_equal(ours, theirs):
    names = ours.rows[0].keys() | ours.rows[-1].keys()
    assert ours.rows == [{name: row[name] for name in names & row.keys()} for row in theirs.rows]
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, theirs.weights[name]), name


@pytest.mark.bit_equal
@pytest.mark.parametrize(
    "changes",
    [
        {"env": PARITY, "minibatches": 1},
        {"env": PARITY, "tasks_per_step": 16, "group_size": 2, **SPLIT},  # the split begins again
        {"env": BREAKING, "seed": 5, **SPLIT},
    ],
    ids=["plain", "two epochs", "failed episodes"],
)
def test_losses_gradients_and_weights_are_those_of_a_run(model, tmp_path, changes):
    theirs = real(model, tmp_path / "x", **TOY | changes)
    assert any(row["groups/no_signal"] > 0 for row in theirs.rows), "some groups are quiet"
    if changes["env"] == BREAKING:
        assert any(row["episodes/failed_infra"] > 0 for row in theirs.rows)
    if changes["minibatches"] > 1:
        assert sum(row["policy/clip_low"] > 0 < row["policy/clip_high"] for row in theirs.rows)
    assert_equal(copied(model, **TOY | changes), theirs)


def test_they_are_those_of_a_run_on_calc(calculator, tmp_path):
    changes = {"env": "calc-v0", "env_settings": SMALL, "steps": 3, "minibatches": 2}
    changes |= {"tasks_per_step": 4, "group_size": 4, "learning_rate": 1e-3, "micro_tokens": 400}
    theirs = real(calculator, tmp_path / "x", **changes)
    assert all(0 < row["reward/mean"] < 1 for row in theirs.rows)
    assert any(row["groups/no_signal"] > 0 for row in theirs.rows)
    assert all(row["tools/calls_mean"] > 0 for row in theirs.rows)
    assert_equal(copied(calculator, **changes), theirs)


@pytest.fixture(scope="module")
def breaking(model, tmp_path_factory):
    """A run that the unchanged file equals."""
    found = real(model, tmp_path_factory.mktemp("real") / "x", env=BREAKING, **TOY, **SPLIT)
    assert_equal(copied(model, env=BREAKING, **TOY, **SPLIT), found)
    return found


def changed(tmp_path, before, after):
    """`train` of the file with one expression replaced."""
    text = FILE.read_text()
    assert text.count(before) == 1, before
    path = tmp_path / "changed_grpo.py"
    path.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location("changed_grpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("correction=1) +", "correction=0) +"),
        ("(correction=1) + 1e-6)", "(correction=1) + 2e-6)"),
        ("1 - settings.clip,", "1 - 1.1 * settings.clip,"),
        ("1 + settings.clip)", "1 + 1.1 * settings.clip)"),
        ("-(gain_BT", "(gain_BT"),
        ("/ n_episodes", "/ len(rows)"),
        ("/ batch.episode_tokens_B1", "/ batch.episode_tokens_B1.float().mean()"),
        ("torch.tensor(branch.mask,", "torch.tensor((*branch.mask[1:], 0),"),
        ("torch.tensor(branch.logprobs)", "torch.tensor(branch.logprobs).roll(1)"),
        ("batch, settings.temperature", "batch, 1.0"),
        ("Sampling(settings.temperature", "Sampling(1.0"),
        ("settings.learning_rate,", "settings.learning_rate * 1.001,"),
        ("(0.9, 0.95)", "(0.9, 0.999)"),
        ("weight_decay=0.0", "weight_decay=0.01"),
        ("settings.max_grad_norm)", "1.0)"),
        ("optimizer.zero_grad()", "pass"),
        ("if episode.reward is not None]", "]"),
        ('"minibatches", step', '"minibatches", 0'),
        ('"train", epoch', '"train", 0, epoch'),
        ("seed=settings.seed,", "seed=settings.seed + 1,"),
    ],
)
def test_a_wrong_number_in_it_shows(model, breaking, tmp_path, before, after):
    train = changed(tmp_path, before, after)
    with pytest.raises((AssertionError, TypeError, RuntimeError)):
        assert_equal(copied(model, train, env=BREAKING, **TOY, **SPLIT), breaking)


def awkward():
    """Forks, a failed, a truncated and a mute episode; a group of equal rewards, a group of one."""
    trunk = branch(4, (3, 5), (2, 0), first_id=20)
    fork = trunk.fork(2).extend(*branch(1, (4, 2), (1, 0), first_id=60).segments[1:])
    compacted = branch(6, (2, 0), first_id=90)
    first = (
        episode(trunk, fork, compacted, reward=1.0),
        episode(branch(2, (7, 3), (2, 0), first_id=120), reward=0.0, sample=1),
        episode(branch(3, (1, 0), first_id=150), reward=None, sample=2),
        episode(branch(3, (9, 0), first_id=30), reward=0.25, sample=3, end=EndReason.MAX_TURNS),
        episode(branch(2, (1, 1), (1, 1), (1, 0), first_id=70), reward=0.75, sample=4),
        episode(reward=0.0, sample=5, end=EndReason.CONTEXT_LENGTH),
    )
    equal = tuple(episode(branch(2, (4, 0), first_id=40 + i), task="u", sample=i) for i in range(3))
    one = (episode(branch(2, (5, 0)), task="v"), episode(reward=None, task="v", sample=1))
    return [Group(first), Group(equal), Group(one)]


@pytest.mark.parametrize("micro_tokens", [16, 40, 1000])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_awkward_episodes_have_the_gradient_of_the_recipe(model, minibatches, micro_tokens):
    row = {"micro_tokens": micro_tokens, "minibatches": minibatches, "temperature": 0.7}
    chosen = grpo.Settings("", str(model), **row)
    policy, algorithm = load_model(model), recipe("grpo")
    theirs, ours = [], []

    def take(losses, found):
        found.append([sum(losses), *(p.grad for p in policy.parameters())])
        policy.zero_grad()

    batch = algorithm.advantage(pack(awkward(), 0))
    for mini in batch.minibatches(minibatches, derive_seed(0, "minibatches", 2)):
        losses = []
        for micro in mini.informative().split(micro_tokens):
            loss, _ = algorithm.loss(token_logprobs(policy, micro, 0.7), micro)
            loss.backward()
            losses.append(loss.item())
        take(losses, theirs)
    groups = enumerate(awkward())
    episodes = [(g, rows) for g, group in groups for rows in grpo.with_advantages(group)]
    for mini in grpo.minibatches(episodes, 2, chosen):
        losses = []
        for micro in grpo.micro_batches(mini, micro_tokens):
            loss = grpo.clipped_loss(policy, micro, len(mini), chosen)
            loss.backward()
            losses.append(loss.item())
        take(losses, ours)
    assert len(ours) == len(theirs) == minibatches
    for (loss, *gradients), (expected, *wanted) in zip(ours, theirs, strict=True):
        assert loss == expected
        for gradient, one in zip(gradients, wanted, strict=True):
            assert (gradient is None) == (one is None)
            assert gradient is None or torch.equal(gradient, one)
    assert any(loss != 0 for loss, *_ in ours)


def test_a_split_smaller_than_a_round_is_refused(model):
    chosen = grpo.Settings(PARITY, str(model), tasks_per_step=41)
    with pytest.raises(ConfigError, match="fewer than the 41 of one round"):
        grpo.train(chosen)


def test_its_settings_are_those_of_a_run():
    theirs = {name: one.default for name, one in TrainConfig.model_fields.items()}
    theirs |= {"micro_tokens": TrainConfig.model_fields["compute"].default.micro_tokens}
    theirs |= {"clip": recipe("grpo").options["clip_low"], "max_grad_norm": 0.5}
    assert recipe("grpo").options["clip_high"] == theirs["clip"]
    assert {name: theirs[name] for name in grpo.Settings._field_defaults} == dict(
        grpo.Settings._field_defaults
    )


def test_it_is_short_and_imports_only_the_nouns_and_the_scoring():
    text = FILE.read_text()
    assert text.count("\n") <= 200
    modules = [node.module for node in ast.walk(ast.parse(text)) if hasattr(node, "module")]
    ours = {name.removeprefix("agentrl.") for name in modules if name.startswith("agentrl")}
    rooms = {"chat", "engines", "errors", "policies", "registry", "rollout", "trajectory", "types"}
    rooms |= {"curriculum", "runner"}
    assert {name for name in ours if name.partition(".")[0] not in rooms} == {
        "trainers.models.scoring",
        "trainers.models.weights",
    }


def test_it_runs_from_the_command_line(model, tmp_path, monkeypatch, capsys):
    def call(*options):
        options = ("--model", str(model), "--out", str(tmp_path / "out"), *options)
        monkeypatch.setattr(sys, "argv", ["grpo.py", *options])
        runpy.run_path(str(FILE), run_name="__main__")

    call("--env", PARITY, "--steps", "2", "--tasks_per_step", "4", "--learning_rate", "1e-3")
    rows = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["grad_norm"] > 0
    before, after = load_model(model).state_dict(), load_model(tmp_path / "out").state_dict()
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())
    assert load_tokenizer(tmp_path / "out").chat_template
    with pytest.raises(SystemExit) as ended:
        call("--env", "calk-v0")
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("did you mean 'calc-v0'?\n")
