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
from agentrl.trainers.offline.card import Subject, refuse_card, stage_card
from agentrl.trainers.offline.data.files import AS_KIND, Split, read_examples, split_by_prompt
from agentrl.trainers.offline.data.nouns import Kind, Messages, Pair, asks_for_one_turn
from agentrl.trainers.offline.fitting import Listen, last_step
from agentrl.trainers.offline.judging import Replies, open_judge, revisions, scores_of
from agentrl.trainers.offline.kinds import KINDS, Done, StageWork
from agentrl.trainers.offline.sampling import answers_to, best_against_worst
from agentrl.trainers.offline.settings import REWARD_MODELS, StageSettings

RESULT = "stage.json"
SCRATCH = "resume"
HELD_OUT = "held_out.jsonl"
REPLIES = "replies.jsonl"


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
        resume: go on from the last checkpoint; a finished stage is returned as it was.
        listen: is told the metrics of the first step and of each `log_every`-th.
        note: is told sentences for people: what became of the data, and signs of trouble.

    Returns:
        what `stage.json` holds: "stage", "run", "model", "steps", "data", "before", "after",
        "signs", "card".

    Raises:
        ConfigError: a setting is wrong, or the folder holds another run.
        UserError: the data cannot be used.
    """
    with owned(folder):
        _refuse_used(settings, folder, resume)
        if (folder / RESULT).exists():
            found: dict[str, Any] = json.loads((folder / RESULT).read_text())
            note(f"{folder} is finished: nothing to do")
            return found
        refuse_card(settings.card)
        kind = KINDS[settings.stage]
        chat = open_chat(settings.model, settings.chat)
        split, report = _read(settings, kind.data(settings))
        prompts = [one.prompt for one in split.held_out if asks_for_one_turn(one)]
        if settings.sample.answers:
            replies = Replies(folder / REPLIES, note)
            split = _sampled(settings, chat, split, replies)
            report |= {"sampled_pairs": len(split.train), "failed": replies.failed.total()}
        rows, held_out, lengths = kind.encode(settings, chat, split, context_of(settings))
        report["lengths"] = lengths
        report |= {"train_rows": len(rows), "held_out_rows": len(held_out)}
        note(data_in_words(report))
        with _records(folder, resume) as writer, _flushed():
            claim = partial(write_bytes_atomic, folder / "config.toml", _text(settings).encode())
            work = StageWork(settings, folder / SCRATCH, chat, split, rows, held_out, claim)
            if settings.stage == "reward":
                _keep_held_out(folder / HELD_OUT, split.held_out)
            done = kind.train(work, writer, _now_and_then(settings, listen), note, resume=resume)
        return _finish(settings, folder, chat, done, report, prompts)


@contextmanager
def _flushed() -> Iterator[None]:
    """Numbers too small for float32's normal form are 0 here: they cost a CPU dearly."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def context_of(settings: StageSettings) -> int:
    """Tokens of the longest row that a stage takes."""
    context = int(load_config(settings.model).get_text_config().max_position_embeddings)
    asked = settings.data.max_tokens
    if asked > context:
        raise ConfigError(
            f"data.max_tokens={asked} is more than the {context} that model {settings.model} takes"
        )
    return asked or context


def data_in_words(report: Mapping[str, Any]) -> str:
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


def _keep_held_out(path: Path, pairs: Sequence[Pair]) -> None:
    """Write the held-out pairs, on which versions of the reward model can be compared later."""
    rows = [
        {
            "prompt": messages_row(one.prompt),
            "chosen": messages_row(one.chosen.messages),
            "rejected": messages_row(one.rejected.messages),
        }
        for one in pairs
        if len(one.chosen.messages) == len(one.rejected.messages) == 1
    ]
    if rows:
        lines = "".join(json.dumps(redactor().row(row)) + "\n" for row in rows)
        write_bytes_atomic(path, lines.encode())


def _read(settings: StageSettings, kind: Kind) -> tuple[Split, dict[str, Any]]:
    data = settings.data
    examples, counts = read_examples(data.files, kind, skip_bad_rows=data.skip_bad_rows)
    split = split_by_prompt(examples, data.held_out, settings.seed)
    if data.held_out and not split.held_out:
        raise UserError(
            f"all {len(examples)} examples of {', '.join(data.files)} have one prompt, so none can"
            " be held out: give more prompts, or set data.held_out=0"
        )
    return split, asdict(counts)


def _text(settings: StageSettings) -> str:
    return tomli_w.dumps(settings.model_dump(mode="json"))


def _refuse_used(settings: StageSettings, folder: Path, resume: bool) -> None:
    """Refuse a folder where another run began to train."""
    path = folder / "config.toml"
    if path.exists():
        if not resume:
            raise ConfigError(
                f"{folder} holds a run already: go on with it by --resume, or choose another --out"
            )
        if path.read_text() != _text(settings):
            raise ConfigError(
                f"{folder} was begun with other settings (see {path}): resume it with those, or"
                " choose another --out"
            )


def _now_and_then(settings: StageSettings, listen: Listen) -> Listen:
    def told(row: Mapping[str, Any]) -> None:
        if row["step"] == 1 or row["step"] % settings.log_every == 0:
            listen(row)

    return told


@contextmanager
def _records(folder: Path, resume: bool) -> Iterator[MetricsWriter]:
    """The metrics of a stage; rows of steps that are taken again are set aside."""
    path = folder / "metrics.jsonl"
    start = last_step(folder / SCRATCH) if resume else 0
    set_aside(path, lambda row: row.get("step", 0) > start)
    with MetricsWriter(path) as writer:
        yield writer


def _sampled(settings: StageSettings, chat: Chat, split: Split, replies: Replies) -> Split:
    """The best and the worst of the model's own answers, in place of the responses of the files."""
    if not all(asks_for_one_turn(one) for side in split for one in side):
        raise UserError(
            "sample.answers is for prompts that one message answers, and the data holds episodes of"
            " agents: play them by `agentrl eval --samples N`, and learn from its episodes.jsonl"
        )
    model = load_policy(settings.model, settings.compute.model_copy(update={"lora_rank": 0}))
    judge = open_judge(settings.sample.judge)
    sides = []
    for side in split:
        prompts = list(dict.fromkeys(one.prompt for one in side))
        replies.note(f"{len(prompts)} prompts: answering each {settings.sample.answers} times")
        answers: Any = answers_to(model, chat, prompts, settings.sample, settings.seed)
        if settings.sample.revise:
            anew = revisions(answers, settings.sample.revise, replies)
            answers = [[*own, *other] for own, other in zip(answers, anew, strict=True)]
        pairs = best_against_worst(answers, scores_of(answers, judge, replies))
        if not pairs and side is split.train:
            raise UserError(
                f"the judge prefers none of the answers to {len(prompts)} prompts: raise"
                " sample.answers or sample.temperature, or look at the judge"
            )
        kind = KINDS[settings.stage].data(settings)
        sides.append(list(AS_KIND[kind](list(pairs))))
    return Split(*sides)


def held_out_prompts(settings: StageSettings) -> list[Messages]:
    """The prompts that a stage with these settings holds out, those of agents' episodes left out.

    Raises:
        UserError: the data cannot be used.
    """
    split, _ = _read(settings, KINDS[settings.stage].data(settings))
    return [one.prompt for one in split.held_out if asks_for_one_turn(one)]


def _card(settings: StageSettings, whose: Subject, prompts: list[Messages]) -> dict[str, Any]:
    return {} if settings.stage in REWARD_MODELS else stage_card(settings.card, whose, prompts)


def _finish(
    settings: StageSettings,
    folder: Path,
    chat: Chat,
    done: Done,
    report: dict[str, Any],
    prompts: list[Messages],
) -> dict[str, Any]:
    """Keep the model and what is known of it; the result is written last."""
    model = folder / "checkpoints" / f"step_{done.steps}" / "model"
    done.save(model)
    chat.tokenizer.save_pretrained(model)
    whose = Subject(
        settings.model, str(model), folder, settings.chat, settings.compute, settings.seed
    )
    result = {
        "stage": settings.stage,
        "run": str(folder),
        "model": str(model),
        "steps": done.steps,
        "data": report,
        "before": done.before,
        "after": done.after,
        "signs": done.signs,
        "card": _card(settings, whose, prompts),
    }
    write_json_atomic(folder / RESULT, result)
    return result
