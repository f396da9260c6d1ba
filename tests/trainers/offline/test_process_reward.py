"""Process reward models: rows with the ends of turns, a loss at these alone, and the same reading
in training and when they judge.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from helpers import call, make_task, says
from hypothesis import given
from hypothesis import strategies as st
from preference_cases import app, tiny_policy, write_rows
from transformers import AutoModelForTokenClassification, Qwen2Config

from agentrl.engines.factory import open_chat
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import read_metrics
from agentrl.records.rows import messages_row
from agentrl.trainers.config import check_config
from agentrl.trainers.offline.examples import Steps, read_row
from agentrl.trainers.offline.process_reward import (
    ProcessRewardStage,
    area_under,
    measure_steps,
    process_loss,
    step_batch,
    step_warnings,
)
from agentrl.trainers.offline.rows import TokenRow
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import run_stage
from agentrl.trainers.run import Run
from agentrl.types import EndReason, Message, Score
from agentrl.verifiers import ProcessRewardModel, with_process_rewards
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.process_reward import progress_of, read_turns

CHANCES = st.lists(st.floats(0, 1), max_size=6)


def talk(*words: str) -> tuple[Message, ...]:
    """A question and turns, each but the last with a call and its answer."""
    made = [Message.user("Ada asks: open the box?")]
    for word in words[:-1]:
        turn = says(call("say", text=word))
        made += [turn, Message.tool(word, turn.tool_calls[0])]
    return (*made, Message.assistant(words[-1]))


def labelled() -> list[dict[str, object]]:
    """Conversations in which a turn that says no spoils the rest; the last says what came of it."""
    rows = []
    for number, words in enumerate(itertools.product(("Yes", "No"), repeat=3)):
        labels = [float("No" not in words[: turn + 1]) for turn in range(3)]
        for name in ("Ada", "Bob", "Cat", "Dan"):
            asked = Message.user(f"{name} asks: sell the box {number}?")
            messages = messages_row((asked, *talk(*words)[1:]))
            rows.append({"messages": messages, "opening": 1, "labels": labels})
    return rows


def stage_of(**process: str) -> ProcessRewardStage:
    row = {"stage": "process_reward", "model": "-", "data": {"files": ["-"]}, "process": process}
    return ProcessRewardStage(StageSettings.model_validate(row))


def step_row(ids: Iterable[int], ends: tuple[int, ...], labels: tuple[float, ...]) -> TokenRow:
    tokens = tuple(ids)
    return TokenRow(tokens, tuple(int(at in ends) for at in range(len(tokens))), labels)


def test_turns_are_read_at_their_last_tokens() -> None:
    messages = talk("Yes", "No", "Yes")
    chat = open_chat(tiny_policy(256))
    (row,) = stage_of(labels="soft").encode(chat, Steps(messages, 1, (1.0, None, 0.25)))
    assert row.targets == (1.0, 0.25)
    ends = [place for place, own in enumerate(row.mask) if own]
    for end, at in zip(ends, (1, 5), strict=True):
        text = chat.tokenizer.decode(row.ids[: end + 1])
        assert text == chat.template.render(messages[: at + 1], generation=False)
    (hard,) = stage_of(labels="hard").encode(chat, Steps(messages, 1, (1.0, None, 0.25)))
    assert hard.targets == (1.0, 1.0) and hard.mask == row.mask


def test_a_template_that_renders_the_past_otherwise_gives_a_row_for_each_turn() -> None:
    def encode(messages: object) -> tuple[int, ...]:
        size = len(list(messages))  # type: ignore[call-overload]
        return (size, *range(size))

    rows = read_turns(encode, talk("Yes", "No", "Yes"), 1)
    assert [(row.turns, row.ends) for row in rows] == [((0,), (2,)), ((1,), (4,)), ((2,), (6,))]


def test_the_loss_reads_the_ends_of_turns_alone() -> None:
    rows = [{"ids": [1, 2, 3, 4], "mask": [0, 1, 0, 1], "targets": [1.0, 0.25]}]
    rows.append({"ids": [5, 6], "mask": [0, 1], "targets": [0.0]})
    batch = step_batch(rows, 0)
    logits = torch.tensor([[9.0, 0.5, -7.0, -1.0], [3.0, 2.0, 1.0, 8.0]], requires_grad=True)
    poisoned = torch.where(batch["step_mask"], logits, torch.nan)
    loss = process_loss(poisoned, batch["step_labels"], batch["step_mask"])
    chance = [1 / (1 + math.exp(-z)) for z in (0.5, -1.0, 2.0)]
    by_hand = -(
        math.log(chance[0])
        + 0.25 * math.log(chance[1])
        + 0.75 * math.log(1 - chance[1])
        + math.log(1 - chance[2])
    )
    assert loss.item() == pytest.approx(by_hand / 3, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    wanted = torch.zeros(2, 4)
    wanted[0, 1], wanted[0, 3], wanted[1, 1] = chance[0] - 1, chance[1] - 0.25, chance[2]
    assert torch.allclose(gradient, wanted / 3, atol=1e-6)


@pytest.mark.parametrize("micro_rows", [1, 2])
def test_each_labelled_turn_counts_alike_in_every_split(micro_rows: int, tmp_path: Path) -> None:
    rows = [
        step_row(range(3, 23), (5,), (1.0,)),
        step_row(range(30, 50), (3, 5, 7, 9, 11), (0.0,) * 5),
        step_row(range(50, 70), (4,), (1.0,)),
        step_row(range(60, 80), (4, 9), (0.5, 0.5)),
    ]

    def gradient(micro: int) -> torch.Tensor:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
        model = AutoModelForTokenClassification.from_config(config)
        settings = StageSettings.model_validate(
            {
                "stage": "process_reward",
                "model": "x",
                "data": {"files": ["d"]},
                "batch_size": 4,
                "micro_rows": micro,
                "steps": 1,
                "compute": {"device": "cpu"},
                "optimizer": {"max_grad_norm": 1e9},
            },
        )
        stage = ProcessRewardStage(settings)
        stage.model, stage.pad_id = model, 0
        trainer = stage.trainer(rows, tmp_path)
        assert trainer.args.gradient_accumulation_steps == 4 // (micro or 4)
        found: list[torch.Tensor] = []
        model.score.bias.register_post_accumulate_grad_hook(
            lambda bias: found.append(bias.grad.clone())
        )
        trainer.train()
        return found[-1]

    assert torch.allclose(gradient(micro_rows), gradient(4), atol=1e-6)
    assert gradient(4).abs() > 1e-3


def test_how_good_chances_are() -> None:
    labels, scores = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert area_under(labels, scores) == 0.75  # the example of scikit-learn's roc_auc_score
    assert area_under(labels, torch.ones(4)) == 0.5 and area_under(torch.ones(4), scores) is None
    assert area_under(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 2.0, 1.0])) == 2 / 3
    rows = [step_row((7, 1, 2), (1, 2), (0.0, 1.0)), step_row((7, 1), (1,), (1.0,))]
    found = measure_steps(rows, [0.25, 0.75, 0.75])
    assert found["auc"] == 1 and found["turns"] == 3 and found["labelled"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(-math.log(0.75)) and found["calibration"] == 0.25
    assert step_warnings(found) == ["its chances are off: calibration error 0.25"]
    assert "have one label" in step_warnings(measure_steps(rows[1:], [0.5]))[0]


@given(CHANCES)
def test_progress_pays_nothing_over_an_episode(chances: list[float]) -> None:
    found = progress_of(chances)
    assert len(found) == len(chances) and math.fsum(found) == pytest.approx(0, abs=1e-12)


def test_progress_by_hand() -> None:
    assert progress_of([0.5, 0.75, 0.25]) == [0.5, 0.25, -0.75]
    assert progress_of([0.9]) == [0.0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"labels": [1.0]}, "1 labels for 3 turns"),
        ({"labels": [1.0, 0.5, 2.0]}, "labels are not from 0 to 1"),
        ({"labels": [None] * 3}, "no turn has a label"),
        ({"messages": [{"content": "x"}]}, "a message is not as `agentrl label` writes it"),
    ],
)
def test_bad_rows_say_what_is_wrong(more: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(read_row(labelled()[0] | more))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    write_rows(folder / "labels.jsonl", labelled())
    row = {
        "stage": "process_reward",
        "model": tiny_policy(256),
        "data": {"files": [str(folder / "labels.jsonl")], "held_out": 0.25},
        "epochs": 20,
        "learning_rate": 1e-2,
        "schedule": {"warmup": 2},
    }
    found = run_stage(StageSettings.model_validate(row), folder / "run")
    assert found["before"]["auc"] == 0.5 and found["before"]["loss"] == pytest.approx(math.log(2))
    assert found["after"]["auc"] >= 0.95 and found["signs"] == []
    assert read_metrics(folder / "run/metrics.jsonl")[-1]["train/loss"] < 0.3
    return Path(found["model"])


def submission(*messages: Message) -> Submission:
    return Submission(make_task(), messages, EndReason.ANSWERED, opening=1)


def test_it_judges_turns_as_it_learnt_them(trained: Path) -> None:
    model = ProcessRewardModel.load(trained)
    spoilt = submission(*talk("Yes", "No", "Yes"))
    score = asyncio.run(model(spoilt))
    first, second, third = score.turns["value"]
    assert first > 0.8 and second < 0.2 and third < 0.2 and score.value == min(second, third)
    alone = [asyncio.run(model.chances(spoilt.messages[:end], 1))[-1] for end in (2, 4, 6)]
    assert alone == pytest.approx([first, second, third], abs=1e-5)

    async def passed(submission: Submission) -> Score:
        return Score(1.0)

    both = {form: model.scorer(form) for form in ("value", "progress")}
    paid = asyncio.run(with_process_rewards(passed, both)(spoilt))
    assert paid.value == 1.0 and paid.turns["value"] == score.turns["value"]
    assert paid.turns["progress"] == pytest.approx([first, second - first, -second])
    short = ProcessRewardModel.load(trained, max_tokens=len(model.encode(spoilt.messages[:3])))
    assert asyncio.run(short.chances(spoilt.messages, 1)) == pytest.approx([first, 0.0, 0.0])
    assert asyncio.run(model(submission(Message.user("?")))).value == 0.0


def test_a_run_gives_credit_by_its_turns(trained: Path, tmp_path: Path) -> None:
    row = {
        "env": "calc-v0", "model": tiny_policy(256), "steps": 1, "tasks_per_step": 1,
        "group_size": 2, "recipe": "turn_grpo", "process_rewards": {"progress": str(trained)},
        "loss": {"turn_weights": {"progress": 1.0}},
    }  # fmt: skip
    with Run(check_config(row, "test"), tmp_path / "run") as run:
        (group,) = run.play(0).groups
    for episode in group.episodes:
        paid = episode.score.turns["progress"]
        said = [one for one in episode.messages if one.role == "assistant"]
        assert len(paid) == len(said) and sum(paid) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ConfigError, match=r"add loss = \{turn_weights = \{progress = 1.0\}\}"):
        Run(check_config(row | {"loss": {}}, "test"), tmp_path / "other")
    missing = row | {"process_rewards": {"progress": tiny_policy(256)}}
    with pytest.raises(ConfigError, match="is no process reward model"):
        Run(check_config(missing, "test"), tmp_path / "other")


def test_the_program_asks_for_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "episodes.jsonl").write_text("")
    (tmp_path / "prm.toml").write_text(
        f'stage = "process_reward"\nmodel = "{tiny_policy(256)}"\n'
        f'data = {{files = ["{tmp_path}/episodes.jsonl"]}}\n'
    )
    assert app("train", tmp_path / "prm.toml", "--out", tmp_path / "run") == 2
    assert f"`agentrl label {tmp_path} --policy" in capsys.readouterr().err
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    wrong = f'data.files=["{tmp_path}/pairs.jsonl"]'
    assert app("train", tmp_path / "prm.toml", "--out", tmp_path / "run", "--set", wrong) == 2
    assert "no steps in" in capsys.readouterr().err


def test_an_ordinary_model_is_no_process_reward_model(
    tmp_path: Path, told_by_transformers: list[str]
) -> None:
    with pytest.raises(UserError, match="is no process reward model: give the model of a stage"):
        ProcessRewardModel.load(tiny_policy(256))
    headless = shutil.copytree(tiny_policy(256), tmp_path / "headless")
    config = json.loads((headless / "config.json").read_text()) | {"process_reward": True}
    (headless / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"it lacks the weights .*score.weight.*: give the model"):
        ProcessRewardModel.load(headless)
    assert told_by_transformers == []
