"""One offline stage, from files to a model: read, split, measure, train, measure again, keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from agentrl.chat.tokens import Chat
from agentrl.engines.factory import open_chat
from agentrl.engines.loading import load_config
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import MetricsWriter, set_aside, write_bytes_atomic, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.redact import redactor
from agentrl.records.rows import messages_row
from agentrl.trainers.models.loading import load_policy
from agentrl.trainers.offline.base import Listen, Stage, fit, whole_checkpoints
from agentrl.trainers.offline.card import Measurement, check_card
from agentrl.trainers.offline.examples import Kind, Messages, Pair, asks_for_one_turn
from agentrl.trainers.offline.files import AS_KIND, Split, read_examples, split_by_prompt
from agentrl.trainers.offline.preference import PreferenceStage
from agentrl.trainers.offline.process_reward import ProcessRewardStage
from agentrl.trainers.offline.reward import RewardStage
from agentrl.trainers.offline.rows import encode_examples
from agentrl.trainers.offline.sampling import (
    Replies,
    answers_to,
    best_against_worst,
    open_judge,
    revise_answers,
    score_answers,
)
from agentrl.trainers.offline.settings import REWARD_MODELS, StageSettings
from agentrl.trainers.offline.sft import SftStage

RESULT = "stage.json"
SCRATCH = "resume"
HELD_OUT = "held_out.jsonl"
REPLIES = "replies.jsonl"

STAGES: Mapping[str, type[Stage]] = {
    "sft": SftStage,
    "preference": PreferenceStage,
    "reward": RewardStage,
    "process_reward": ProcessRewardStage,
}
"""Kind of a stage -> its class."""


def run_stage(
    settings: StageSettings,
    folder: Path,
    *,
    resume: bool = False,
    listen: Listen = lambda row: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Run a stage in its folder: `config.toml`, `metrics.jsonl`, `checkpoints/step_N/model`,
    `stage.json`.

    Args:
        resume: continue from the last checkpoint; a finished stage is returned as it was.
        listen: receives the metrics of the first step and of every `log_every`-th.
        note: receives sentences for people: what became of the data, and warnings.

    Returns:
        what `stage.json` holds: "stage", "run", "model", "steps", "data", "before", "after",
        "signs" (warnings), "card".

    Raises:
        ConfigError: a setting is wrong, or the folder holds another run.
        UserError: the data cannot be used.
    """
    with owned(folder):
        _refuse_used(settings, folder, resume)
        if (folder / RESULT).exists():
            finished: dict[str, Any] = json.loads((folder / RESULT).read_text())
            note(f"{folder} is finished: nothing to do")
            return finished
        check_card(settings.card)
        stage = STAGES[settings.stage](settings)
        chat = open_chat(settings.model, settings.chat)
        split, report = _read(settings, stage.examples)
        prompts = [each.prompt for each in split.held_out if asks_for_one_turn(each)]
        if settings.sample.answers:
            replies = Replies(folder / REPLIES, note)
            split = _sample(stage, chat, split, replies)
            report |= {"sampled_pairs": len(split.train), "failed": replies.failed.total()}
        encode, limit = partial(stage.encode, chat), longest_row(settings)
        rows, lengths = encode_examples(split.train, encode, limit, settings.data.too_long)
        held_out, _ = encode_examples(split.held_out, encode, limit, "drop")
        report |= {"lengths": lengths, "train_rows": len(rows), "held_out_rows": len(held_out)}
        note(describe_data(report))
        if settings.stage == "reward":
            _keep_held_out(folder / HELD_OUT, split.held_out)
        with _records(folder, resume) as writer, _flush_denormals():
            trainer = stage.build(chat, rows, folder / SCRATCH)
            warnings = stage.warnings_before(rows)
            for warning in warnings:
                note(warning)
            before = stage.measure(held_out) if held_out else {}
            write_bytes_atomic(folder / "config.toml", _text(settings).encode())
            fit(trainer, writer, _every(settings.log_every, listen), resume=resume)
            after = stage.measure(held_out) if held_out else {}
        warnings += stage.warnings_after(before, after)
        steps = stage.steps(len(rows))
        model = folder / "checkpoints" / f"step_{steps}" / "model"
        stage.save(model)
        chat.tokenizer.save_pretrained(model)
        card = {}
        if settings.stage not in REWARD_MODELS:
            card = Measurement(
                settings.card,
                before=settings.model,
                after=str(model),
                run=folder,
                chat=settings.chat,
                compute=settings.compute,
                seed=settings.seed,
            ).measure(prompts)
        result = {
            "stage": settings.stage,
            "run": str(folder),
            "model": str(model),
            "steps": steps,
            "data": report,
            "before": before,
            "after": after,
            "signs": warnings,
            "card": card,
        }
        write_json_atomic(folder / RESULT, result)  # last: it says that the stage is finished
        return result


@contextmanager
def _flush_denormals() -> Iterator[None]:
    """Treat numbers too small for float32's normal form as 0: they are very slow on a CPU."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def longest_row(settings: StageSettings) -> int:
    """Tokens of the longest row that a stage takes."""
    context = int(load_config(settings.model).get_text_config().max_position_embeddings)
    asked = settings.data.max_tokens
    if asked > context:
        raise ConfigError(
            f"data.max_tokens={asked} is more than the {context} that model {settings.model} takes",
            setting="data.max_tokens",
        )
    return asked or context


def describe_data(report: Mapping[str, Any]) -> str:
    """What became of the data, in one line."""
    lengths = report["lengths"]
    parts = [
        f"{report['rows']} rows",
        f"{report['train_rows']} train",
        f"{report['held_out_rows']} held out",
        *(f"{report[name]} {name}" for name in ("ties", "repeated") if report[name]),
        f"tokens: median {lengths['median']}, longest {lengths['longest']}",
    ]
    if lengths["too_long"]:
        parts.append(f"{lengths['too_long']} longer than {lengths['limit']} left out")
    return "data: " + "; ".join([*parts, *report["skipped"]])


def held_out_prompts(settings: StageSettings) -> list[Messages]:
    """The prompts that a stage with these settings holds out, without those of agents' episodes.

    Raises:
        UserError: the data cannot be used.
    """
    split, _ = _read(settings, STAGES[settings.stage](settings).examples)
    return [each.prompt for each in split.held_out if asks_for_one_turn(each)]


def _read(settings: StageSettings, kind: Kind) -> tuple[Split, dict[str, Any]]:
    data = settings.data
    examples, counts = read_examples(data.files, kind, skip_bad_rows=data.skip_bad_rows)
    split = split_by_prompt(examples, data.held_out, settings.seed)
    if data.held_out and not split.held_out:
        raise UserError(
            f"all {len(examples)} examples of {', '.join(data.files)} have one prompt, so none can"
            " be held out: give more prompts, or set data.held_out=0",
            setting="data.held_out",
        )
    return split, asdict(counts)


def _keep_held_out(path: Path, pairs: Sequence[Pair]) -> None:
    """Write the held-out pairs: versions of the reward model are compared on them later."""
    rows = [
        {
            "prompt": messages_row(pair.prompt),
            "chosen": messages_row(pair.chosen.messages),
            "rejected": messages_row(pair.rejected.messages),
        }
        for pair in pairs
        if len(pair.chosen.messages) == len(pair.rejected.messages) == 1
    ]
    if rows:
        lines = "".join(json.dumps(redactor().row(row)) + "\n" for row in rows)
        write_bytes_atomic(path, lines.encode())


def _text(settings: StageSettings) -> str:
    return tomli_w.dumps(settings.model_dump(mode="json"))


def _refuse_used(settings: StageSettings, folder: Path, resume: bool) -> None:
    """Refuse a folder where another run began to train."""
    path = folder / "config.toml"
    if not path.exists():
        return
    if not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or choose another --out"
        )
    if path.read_text() != _text(settings):
        raise ConfigError(
            f"{folder} was begun with other settings (see {path}): resume it with those, or"
            " choose another --out"
        )


def _every(steps: int, listen: Listen) -> Listen:
    def listen_sometimes(row: Mapping[str, Any]) -> None:
        if row["step"] == 1 or row["step"] % steps == 0:
            listen(row)

    return listen_sometimes


@contextmanager
def _records(folder: Path, resume: bool) -> Iterator[MetricsWriter]:
    """The metrics of a stage; rows of steps that are taken again are set aside."""
    path = folder / "metrics.jsonl"
    start = max(whole_checkpoints(folder / SCRATCH), default=0) if resume else 0
    set_aside(path, lambda row: row.get("step", 0) > start)
    with MetricsWriter(path) as writer:
        yield writer


def _sample(stage: Stage, chat: Chat, split: Split, replies: Replies) -> Split:
    """The best and the worst of the model's own answers, in place of the responses of the files."""
    settings = stage.settings
    if not all(asks_for_one_turn(example) for side in split for example in side):
        raise UserError(
            "sample.answers is for prompts that one message answers, and the data holds episodes of"
            " agents: play them by `agentrl eval --samples N`, and learn from its episodes.jsonl",
            setting="sample.answers",
        )
    model = load_policy(settings.model, settings.compute.model_copy(update={"lora_rank": 0}))
    judge = open_judge(settings.sample.judge)
    sides = []
    for side in split:
        prompts = list(dict.fromkeys(example.prompt for example in side))
        replies.note(f"{len(prompts)} prompts: answering each {settings.sample.answers} times")
        answers = answers_to(model, chat, prompts, settings.sample, settings.seed)
        if settings.sample.revise:
            revised = revise_answers(answers, settings.sample.revise, replies)
            answers = [[*own, *new] for own, new in zip(answers, revised, strict=True)]
        pairs = best_against_worst(answers, score_answers(answers, judge, replies))
        if not pairs and side is split.train:
            raise UserError(
                f"the judge prefers none of the answers to {len(prompts)} prompts: raise"
                " sample.answers or sample.temperature, or look at the judge"
            )
        sides.append(list(AS_KIND[stage.examples](list(pairs))))
    return Split(*sides)
