"""The kinds of offline stages: what each reads, how it encodes rows, and how it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import MetricsWriter
from agentrl.trainers.models.loading import load_policy, reference_of, save_policy
from agentrl.trainers.offline import measure, process_reward, reward
from agentrl.trainers.offline.alignment import Alignment, aligner
from agentrl.trainers.offline.data.files import Split
from agentrl.trainers.offline.data.nouns import Kind
from agentrl.trainers.offline.data.tokens import (
    LabelRow,
    conversation_rows,
    label_row,
    pair_row,
    tokenised,
)
from agentrl.trainers.offline.fitting import Listen, StagePlan, arguments, fit, optimizers
from agentrl.trainers.offline.objectives import objective
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.sft import SftRow, sft_trainer

Encoded = tuple[list[Any], list[Any], dict[str, int]]


@dataclass(frozen=True)
class StageWork:
    """What a stage trains on.

    Attributes:
        scratch: for checkpoints to go on from.
        split: the examples, as they were read.
        rows, held_out: the same as tokens.
        claim: is called when all that could be refused was not, right before the first step.
    """

    settings: StageSettings
    scratch: Path
    chat: Chat
    split: Split
    rows: list[Any]
    held_out: list[Any]
    claim: Callable[[], None]


@dataclass(frozen=True)
class Done:
    """What a stage reached.

    Attributes:
        save: writes the model into a folder.
        before, after: what held-out rows said.
        signs: of trouble, in sentences.
    """

    steps: int
    save: Callable[[Path], object]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    signs: list[str]


class _Train(Protocol):
    def __call__(
        self,
        work: StageWork,
        writer: MetricsWriter,
        listen: Listen,
        note: Callable[[str], None],
        *,
        resume: bool,
    ) -> Done: ...


@dataclass(frozen=True)
class StageParts:
    """One kind of stage.

    Attributes:
        data: which examples it takes.
        encode: examples to rows that train, rows that are held out, and lengths.
    """

    data: Callable[[StageSettings], Kind]
    encode: Callable[[StageSettings, Chat, Split, int], Encoded]
    train: _Train


def _encode(
    one: Callable[[Chat, Any], Sequence[Any]],
    settings: StageSettings,
    chat: Chat,
    split: Split,
    limit: int,
) -> Encoded:
    """Both sides of a split as rows."""
    train, lengths = tokenised(split.train, partial(one, chat), limit, settings.data.too_long)
    held_out, _ = tokenised(split.held_out, partial(one, chat), limit, "drop")
    return train, held_out, lengths.row()


def _aligned_data(settings: StageSettings) -> Kind:
    found, _ = objective(settings.objective, settings.loss)
    if found.of_batch and settings.micro_rows not in (0, settings.batch_size):
        raise ConfigError(
            f"micro_rows={settings.micro_rows}: the loss of objective {settings.objective!r} reads"
            " its whole batch, so set micro_rows=0"
        )
    if found.loss is None and settings.batch_size < 2:
        raise ConfigError("batch_size=1: KTO compares responses of a batch, so give 2 or more")
    return "pairs" if found.loss else "labels"


def _encode_aligned(settings: StageSettings, chat: Chat, split: Split, limit: int) -> Encoded:
    def one(chat: Chat, example: Any) -> Sequence[Any]:
        made = pair_row if _aligned_data(settings) == "pairs" else label_row
        return [made(chat, example)]

    return _encode(one, settings, chat, split, limit)


def _train_sft(
    work: StageWork,
    writer: MetricsWriter,
    listen: Listen,
    note: Callable[[str], None],
    *,
    resume: bool,
) -> Done:
    settings = work.settings
    model = _policy(settings)
    plan = StagePlan.of(settings, len(work.rows))
    rows = [SftRow.of(row) for row in work.rows]
    trainer = sft_trainer(
        model,
        work.chat,
        rows,
        arguments(settings, plan, work.scratch),
        optimizers(settings, model, plan.steps),
    )
    judge = partial(_likelihoods, work)
    before = judge(model)
    fit(trainer, writer, listen, work.claim, resume=resume)
    after = judge(model)
    signs = []
    if before and after["nll"] > before["nll"]:
        signs.append(
            f"held-out rows became less likely ({before['nll']:.3f} to {after['nll']:.3f} nats per"
            " token): fewer epochs, or a smaller learning rate"
        )
    return Done(plan.steps, partial(save_policy, model), before, after, signs)


def _policy(settings: StageSettings) -> Any:
    """The model that trains; new adapters are drawn from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed % 2**63)
        return load_policy(settings.model, settings.compute)


def _likelihoods(work: StageWork, model: Any) -> dict[str, float]:
    if not work.held_out:
        return {}
    return measure.likelihoods(model, work.held_out, work.settings.compute.micro_tokens)


def _train_aligned(
    work: StageWork,
    writer: MetricsWriter,
    listen: Listen,
    note: Callable[[str], None],
    *,
    resume: bool,
) -> Done:
    settings = work.settings
    found, options = objective(settings.objective, settings.loss)
    if found.loss is None and len(work.rows) < 2:
        raise UserError("KTO compares responses of a batch and got 1 row to train on: give more")
    model = _policy(settings)
    reference = reference_of(model, settings.compute, settings.model)
    plan = StagePlan.of(settings, len(work.rows))
    signs = []
    if found.loss is not None:
        summed = found.options["beta"] < 1 and found.reference
        signs = list(measure.data_signs(work.rows, options["beta"] if summed else None))
    for sign in signs:
        note(sign)
    judge = partial(_margins, work, reference)
    before = judge(model)
    if before and not resume:
        signs += measure.reference_sign(before)
    # TRL switches adapters off by itself, and takes a reference only where there are none.
    theirs = None if settings.compute.lora_rank and found.trl else reference
    parts = Alignment(model, work.chat.tokenizer, theirs, found, options)
    trainer = aligner(parts, work.rows, settings, plan, work.scratch)
    fit(trainer, writer, listen, work.claim, resume=resume)
    after = judge(model)
    if after:
        signs += measure.outcome_signs(after, settings.objective)
    return Done(plan.steps, partial(save_policy, model), before, after, signs)


def _margins(work: StageWork, reference: Any, model: Any) -> dict[str, Any]:
    """Held-out pairs under the policy, against the reference; labels are no pairs."""
    rows = work.held_out
    if not rows or isinstance(rows[0], LabelRow):
        return _labelled(work, reference, model) if rows else {}
    tokens = work.settings.compute.micro_tokens
    then, now = (measure.pair_logprobs(one, rows, tokens) for one in (reference, model))
    return measure.compared(rows, then, now)


def _labelled(work: StageWork, reference: Any, model: Any) -> dict[str, Any]:
    """Held-out labels, as pairs of any desirable with any undesirable response would see them."""
    tokens, rows = work.settings.compute.micro_tokens, [row.row for row in work.held_out]
    then, now = (measure.response_logprobs(one, rows, tokens) for one in (reference, model))
    return measure.separated([row.desirable for row in work.held_out], rows, then, now)


def _train_reward(
    work: StageWork,
    writer: MetricsWriter,
    listen: Listen,
    note: Callable[[str], None],
    *,
    resume: bool,
) -> Done:
    settings, tokenizer, pad_id = work.settings, work.chat.tokenizer, _padding(work)
    model = reward.new_reward_model(settings, pad_id)
    trainer, plan = reward.reward_trainer(model, tokenizer, work.rows, settings, work.scratch)

    def judge() -> dict[str, Any]:
        if not work.held_out:
            return {}
        sides = ([row.chosen for row in work.held_out], [row.rejected for row in work.held_out])
        scored = [reward.rewards_of(model, side, pad_id) for side in sides]
        found: dict[str, Any] = reward.judged(work.held_out, *scored)
        return found

    before = judge()
    fit(trainer, writer, listen, work.claim, resume=resume)
    after = judge()
    return Done(plan.steps, model.save_pretrained, before, after, reward.signs(after))


def _padding(work: StageWork) -> int:
    pad_id = work.chat.tokenizer.pad_token_id
    if not isinstance(pad_id, int):
        raise ConfigError("the tokenizer has no padding token: set tokenizer.pad_token and save it")
    return pad_id


def _encode_steps(settings: StageSettings, chat: Chat, split: Split, limit: int) -> Encoded:
    one = partial(process_reward.step_rows, hard=settings.process.labels == "hard")
    return _encode(one, settings, chat, split, limit)


def _train_process(
    work: StageWork,
    writer: MetricsWriter,
    listen: Listen,
    note: Callable[[str], None],
    *,
    resume: bool,
) -> Done:
    settings, pad_id = work.settings, _padding(work)
    model = process_reward.new_process_model(settings, pad_id)
    trainer, plan = process_reward.process_trainer(model, pad_id, work.rows, settings, work.scratch)

    def judge() -> dict[str, Any]:
        if not work.held_out:
            return {}
        chances = process_reward.chances_of(model, work.held_out, pad_id)
        return process_reward.judged_steps(work.held_out, chances)

    before = judge()
    fit(trainer, writer, listen, work.claim, resume=resume)
    after = judge()
    said = process_reward.signs_of_steps(after)
    return Done(plan.steps, model.save_pretrained, before, after, said)


KINDS: Mapping[str, StageParts] = {
    "sft": StageParts(
        lambda settings: "conversations", partial(_encode, conversation_rows), _train_sft
    ),
    "preference": StageParts(_aligned_data, _encode_aligned, _train_aligned),
    "reward": StageParts(
        lambda settings: "pairs",
        partial(_encode, lambda chat, pair: [reward.reward_row(chat, pair)]),
        _train_reward,
    ),
    "process_reward": StageParts(lambda settings: "steps", _encode_steps, _train_process),
}
"""Kind of a stage -> its parts."""
