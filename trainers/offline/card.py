"""What a stage changed: answers of its model beside those of the model that it began with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.chat.settings import ChatSettings
from agentrl.engines.factory import open_chat
from agentrl.evaluation.results.compare import compare_runs
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.config import Compute
from agentrl.trainers.models.loading import load_policy
from agentrl.trainers.offline.data.nouns import Messages
from agentrl.trainers.offline.data.tokens import TokenRow
from agentrl.trainers.offline.judging import Replies, open_judge
from agentrl.trainers.offline.measure import response_logprobs
from agentrl.trainers.offline.readiness import readiness
from agentrl.trainers.offline.sampling import OwnAnswer, answers_to
from agentrl.trainers.offline.settings import Card, SampleSettings
from agentrl.verifiers.models.named import depends_on


@dataclass(frozen=True)
class Subject:
    """Whose card it is: two models, and how they are loaded.

    Attributes:
        before, after: folders.
        chat: of both.
        run: the stage's folder; episodes of both models are kept in its `eval/`.
    """

    before: str
    after: str
    run: Path
    chat: ChatSettings
    compute: Compute
    seed: int


def refuse_card(card: Card) -> None:
    """See that everything a card asks can be had, before a stage trains.

    Raises:
        ConfigError: a judge or an environment cannot be had.
    """
    if card.judge:
        open_judge(card.judge)
    if card.env:
        factory(card.env, **card.env_settings)()


def stage_card(card: Card, whose: Subject, prompts: Sequence[Messages]) -> dict[str, Any]:
    """Measure a policy against the model that its stage began with.

    Args:
        prompts: held-out ones; at most `card.prompts` are answered, each once.

    Returns:
        "prompts"; "length" (mean tokens of an answer) and "unfinished" (share), each "before" and
        "after"; "kl", KL(after || before) per answer in nats, estimated on the "answers" (how many)
        of the trained model; where there is a judge, "judge" (its mean verdicts, before and after)
        and "win_rate" of after over before, ties counting half, over the "judged" prompts (how
        many, None where the judge failed at all of them) and "judge_by", the version of a reward
        model behind an address or the digest of a rubric; where there is an environment,
        "pass_at_1" before and after, "gain" (the difference over the same tasks with its "ci95")
        where both were scored, and "readiness" of the trained model (see `readiness`).
    """
    asked = list(dict.fromkeys(prompts))[: card.prompts]
    found: dict[str, Any] = {"prompts": len(asked)}
    if asked:
        found |= _answered(card, whose, asked)
    if card.env:
        folders = {"before": whose.before, "after": whose.after}
        found["pass_at_1"] = {
            when: _pass_at_1(card, folder, whose, whose.run / "eval" / when)
            for when, folder in folders.items()
        }
        if None not in found["pass_at_1"].values():
            pair = compare_runs(*(whose.run / "eval" / when for when in folders))
            found["gain"] = {"pass_at_1": pair["difference"], "ci95": list(pair["ci95"])}
        played = read_episodes(whose.run / "eval" / "after" / "episodes.jsonl").values()
        found["readiness"] = readiness(played, found["pass_at_1"]["before"])
    return found


def _answered(card: Card, whose: Subject, prompts: list[Messages]) -> dict[str, Any]:
    plain = whose.compute.model_copy(update={"lora_rank": 0})
    how = SampleSettings(max_tokens=card.max_tokens)
    chat = open_chat(whose.after, whose.chat)
    then, now = (load_policy(folder, plain).eval() for folder in (whose.before, whose.after))
    before, after = (
        [group[0] for group in answers_to(one, chat, prompts, how, whose.seed) if group]
        for one in (then, now)
    )
    if not after:
        return {}
    rows = [TokenRow(one.branch.ids, one.branch.mask) for one in after]
    tokens = whose.compute.micro_tokens
    gaps = zip(*(response_logprobs(one, rows, tokens) for one in (now, then)), strict=True)
    sides = {"before": before, "after": after}
    found: dict[str, Any] = {
        "length": {name: fmean(a.tokens for a in side) for name, side in sides.items()},
        "unfinished": {name: fmean(not a.finished for a in side) for name, side in sides.items()},
        "kl": fmean(a - b for a, b in gaps),
        "answers": len(after),
    }
    return found | (_judged(card.judge, before, after) if card.judge else {})


def _judged(name: str, before: Sequence[OwnAnswer], after: Sequence[OwnAnswer]) -> dict[str, Any]:
    judge = open_judge(name)
    old, new = (
        judge([(one.prompt, one.message) for one in side], Replies()) for side in (before, after)
    )
    wins = [
        0.5 if a == b else float(a > b)
        for a, b in zip(new, old, strict=True)
        if a is not None and b is not None
    ]
    read = {
        # -inf: too long to be read; None: the judge failed
        when: [value for value in side if value is not None and math.isfinite(value)]
        for when, side in (("before", old), ("after", new))
    }
    means = {when: fmean(values) if values else None for when, values in read.items()}
    by = {"judge_by": found} if (found := depends_on(name)) else {}
    return {"judge": means, "judged": len(wins), "win_rate": fmean(wins) if wins else None, **by}


def _pass_at_1(card: Card, folder: str, whose: Subject, out: Path) -> float | None:
    plan = EvalPlan(
        make=factory(card.env, **card.env_settings),
        policy=f"hf:{folder}",
        limit=card.tasks,
        samples=card.samples,
        out=out,
        sandbox=card.sandbox,
        seed=whose.seed,
        chat=whose.chat,
    )
    value: float | None = evaluate(plan)["pass_at"].get("1")
    return value


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """The card in words, for the terminal."""
    lines = [
        f"{name} {card[name]['before']:.3f} -> {card[name]['after']:.3f}"
        for name in ("pass_at_1", "judge", "length", "unfinished")
        if name in card and None not in card[name].values()
    ]
    if gain := card.get("gain"):
        low, high = gain["ci95"]
        lines.append(f"gain {gain['pass_at_1']:+.3f} (95 % {low:+.3f} to {high:+.3f})")
    lines += [
        f"{name} {card[name]:.3f} (n={card[of]})"
        for name, of in (("kl", "answers"), ("win_rate", "judged"))
        if card.get(name) is not None
    ]
    if ready := card.get("readiness"):
        problems = "; ".join(ready["problems"])
        lines.append(f"not ready for RL: {problems}" if problems else "ready for RL")
    return lines
