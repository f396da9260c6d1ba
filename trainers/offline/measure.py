"""What a policy makes of held-out rows, and the signs that alignment goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from statistics import fmean
from typing import Any

import torch

from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline.alignment import Rows
from agentrl.trainers.offline.data.tokens import PairRow, TokenRow


@torch.no_grad()
def response_logprobs(model: Any, rows: Sequence[TokenRow], micro_tokens: int) -> list[float]:
    """Log-probability of each row's trained tokens together, in nats; rows are scored by length."""
    was_training = model.training
    model.eval()
    found = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda at: len(rows[at].ids))
    while order:
        size = max(1, micro_tokens // len(rows[order[-1]].ids))
        part, order = order[-size:], order[:-size]
        batch = Rows.of([rows[at] for at in part], next(model.parameters()).device)
        sums_B = token_logprobs(model, batch, entropy="off").logprobs_BT.sum(-1)
        for at, value in zip(part, sums_B.tolist(), strict=True):
            found[at] = value
    model.train(was_training)
    return found


def likelihoods(model: Any, rows: Sequence[TokenRow], micro_tokens: int) -> dict[str, float]:
    """ "nll": nats per trained token of held-out rows."""
    total = sum(response_logprobs(model, rows, micro_tokens))
    return {"nll": -total / sum(sum(row.mask) for row in rows)}


PairLogprobs = tuple[list[float], list[float]]


def pair_logprobs(model: Any, rows: Sequence[PairRow], micro_tokens: int) -> PairLogprobs:
    """Log-probabilities of the chosen and of the rejected responses."""
    both = [row.chosen for row in rows] + [row.rejected for row in rows]
    found = response_logprobs(model, both, micro_tokens)
    return found[: len(rows)], found[len(rows) :]


def compared(rows: Sequence[PairRow], then: PairLogprobs, now: PairLogprobs) -> dict[str, Any]:
    """How a policy changed on pairs: margins and likelihoods against those it began with.

    Returns:
        "margin" (mean of Δ = the chosen ratio minus the rejected one, in nats), "accuracy" (share
        of Δ > 0), "ties" (share of Δ = 0: all, where the policy is the reference), "preferred"
        (share of pairs whose chosen response is likelier per token), and how "chosen" and
        "rejected" moved, in nats per token.
    """
    chosen = [a - b for a, b in zip(now[0], then[0], strict=True)]
    rejected = [a - b for a, b in zip(now[1], then[1], strict=True)]
    delta = [a - b for a, b in zip(chosen, rejected, strict=True)]
    tokens = [(sum(row.chosen.mask), sum(row.rejected.mask)) for row in rows]
    likelier = [a / m > b / n for a, b, (m, n) in zip(*now, tokens, strict=True)]
    return {
        "margin": fmean(delta),
        "accuracy": fmean(one > 0 for one in delta),
        "ties": fmean(one == 0 for one in delta),
        "preferred": fmean(likelier),
        "chosen": sum(chosen) / sum(m for m, _ in tokens),
        "rejected": sum(rejected) / sum(n for _, n in tokens),
        "pairs": len(rows),
    }


def data_signs(rows: Sequence[PairRow], beta: float | None) -> Iterator[str]:
    """What makes DPO fail and is seen before it runs.

    Args:
        beta: of a loss on summed log-probabilities; None for others, whose β has another scale.
    """
    if beta is not None and not 0.01 <= beta <= 1:
        yield (
            f"loss.beta={beta} is outside of 0.01 to 1: below, the policy runs away from the"
            " reference; above, it hardly moves"
        )
    alike = sum(_are_alike(row) for row in rows) / len(rows)
    if alike > 0.5:
        yield f"{alike:.0%} of pairs share over 90% of their tokens: chosen and rejected are alike"
    lengths = [(sum(row.chosen.mask), sum(row.rejected.mask)) for row in rows]
    longer = [(m > n) for m, n in lengths if m != n]
    means = fmean(m for m, _ in lengths), fmean(n for _, n in lengths)
    share = sum(longer) / len(longer) if len(longer) >= 20 else 0.5
    if not 0.3 <= share <= 0.7 and max(means) > 1.2 * min(means):
        yield (
            f"the chosen response is the longer one in {share:.0%} of pairs (means"
            f" {means[0]:.0f} and {means[1]:.0f} tokens): length may be learnt; compare"
            " objective='dpo_norm' or 'simpo'"
        )


def outcome_signs(found: Mapping[str, Any], objective: str) -> Iterator[str]:
    """What went wrong, as held-out pairs show."""
    anchor = "a larger loss.nll_coef" if objective == "dpo_nll" else "objective='dpo_nll'"
    if found["chosen"] < 0 and found["rejected"] < 0 and found["margin"] > 0:
        yield (
            f"likelihood displacement: chosen responses became less likely too"
            f" ({found['chosen']:+.3f} nats per token, rejected {found['rejected']:+.3f}); compare"
            f" {anchor}, or a smaller learning rate"
        )
    if found["margin"] <= 0:
        yield f"held-out margins did not grow ({found['margin']:+.3f} nats)"


def reference_sign(start: Mapping[str, Any]) -> Iterator[str]:
    """Before the first step policy and reference are one: every margin is zero."""
    if abs(start["margin"]) > 1e-3:
        yield f"policy and reference differ before training (margin {start['margin']:+.4f} nats)"


def _are_alike(row: PairRow) -> bool:
    """Whether two responses share over 90% of their tokens, in order."""
    chosen, rejected = (one.ids[one.prompt :] for one in (row.chosen, row.rejected))
    found = SequenceMatcher(None, chosen, rejected, autojunk=False)
    # The first two are upper bounds of the third, which takes the square of the length.
    return all(share() > 0.9 for share in (found.real_quick_ratio, found.quick_ratio, found.ratio))


def separated(
    desirable: Sequence[bool],
    rows: Sequence[TokenRow],
    then: Sequence[float],
    now: Sequence[float],
) -> dict[str, Any]:
    """How a policy changed on labelled responses, with the names of `compared`.

    Returns:
        "margin": mean ratio of desirable responses minus that of undesirable ones; "accuracy": the
        share of all pairs of one of each in which the desirable one gained more, "ties" that of
        those in which both gained alike; "chosen" and "rejected": how the two kinds moved, in nats
        per token. Empty where one kind is missing.
    """
    ratios: dict[bool, list[float]] = {True: [], False: []}
    tokens = {True: 0, False: 0}
    for wanted, row, a, b in zip(desirable, rows, now, then, strict=True):
        ratios[wanted].append(a - b)
        tokens[wanted] += sum(row.mask)
    if not all(ratios.values()):
        return {}
    gaps = [a - b for a in ratios[True] for b in ratios[False]]
    return {
        "margin": fmean(ratios[True]) - fmean(ratios[False]),
        "accuracy": fmean(gap > 0 for gap in gaps),
        "ties": fmean(gap == 0 for gap in gaps),
        "chosen": sum(ratios[True]) / tokens[True],
        "rejected": sum(ratios[False]) / tokens[False],
        "labels": len(rows),
    }
