"""What a stage changed: its model is compared with the model that it started from, on the same
held-out prompts and tasks, and judged ready or not for reinforcement learning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.chat.settings import ChatSettings
from agentrl.engines.factory import open_chat
from agentrl.evaluation.compare import compare_runs
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.config import Compute
from agentrl.trainers.models.loading import load_policy
from agentrl.trainers.offline.examples import Messages
from agentrl.trainers.offline.rows import TokenRow
from agentrl.trainers.offline.sampling import Replies, SampledAnswer, answers_to, open_judge
from agentrl.trainers.offline.settings import Card, SampleSettings
from agentrl.trainers.offline.sft import response_logprobs
from agentrl.trajectory import Episode
from agentrl.types import EndReason
from agentrl.verifiers.models.named import depends_on

SIDES = ("before", "after")
LEAST = {"parsed": 0.8, "scored": 0.9, "mixed": 0.2, "distinct": 0.3}
"""Smallest share of each property with which a policy is ready for reinforcement learning."""
FIXES = {
    "parsed": "its calls cannot be read: more demonstrations, or another chat.parser",
    "scored": "infrastructure fails its episodes: see `failure` in episodes.jsonl",
    "mixed": "its groups have no signal: easier or harder tasks, or more supervised training",
    "distinct": "its episodes are alike: train less long, or raise the temperature",
}


def check_card(card: Card) -> None:
    """See that the judge and the environment of a card exist, before a stage trains.

    Raises:
        ConfigError: one of them does not.
    """
    if card.judge:
        open_judge(card.judge)
    if card.env:
        factory(card.env, **card.env_settings)()


@dataclass(frozen=True)
class Measurement:
    """Two models to compare, and how they are loaded.

    Attributes:
        before, after: model folders.
        run: the stage's folder; episodes of both models are kept in its `eval/`.
    """

    card: Card
    before: str
    after: str
    run: Path
    chat: ChatSettings
    compute: Compute
    seed: int

    def measure(self, prompts: Sequence[Messages]) -> dict[str, Any]:
        """Measure a policy against the model that its stage started from.

        Args:
            prompts: held-out ones; at most `card.prompts` are answered, each once.

        Returns:
            "prompts"; "length" (mean tokens of an answer) and "unfinished" (share), each "before"
            and "after"; "kl", KL(after || before) per answer in nats, estimated on the "answers"
            (their number) of the trained model. With a judge: "judge" (its mean scores, before and
            after), "win_rate" of after over before (ties count half) over the "judged" prompts
            (their number; the rate is None where the judge failed at all of them) and "judge_by",
            the version of a reward model behind an address or the digest of a rubric. With an
            environment: "pass_at_1" before and after, "gain" (the difference over the same tasks
            with its "ci95") where both were scored, and "readiness" of the trained model.
        """
        asked = list(dict.fromkeys(prompts))[: self.card.prompts]
        result: dict[str, Any] = {"prompts": len(asked)}
        if asked:
            result |= self._measure_answers(asked)
        if self.card.env:
            result |= self._measure_episodes()
        return result

    def _measure_answers(self, prompts: list[Messages]) -> dict[str, Any]:
        compute = self.compute.model_copy(update={"lora_rank": 0})
        settings = SampleSettings(max_tokens=self.card.max_tokens)
        chat = open_chat(self.after, self.chat)
        models = [load_policy(folder, compute).eval() for folder in (self.before, self.after)]
        before, after = (
            [group[0] for group in answers_to(model, chat, prompts, settings, self.seed) if group]
            for model in models
        )
        if not after:
            return {}
        rows = [TokenRow(each.branch.ids, each.branch.mask) for each in after if each.branch]
        then, now = (response_logprobs(each, rows, self.compute.micro_tokens) for each in models)
        answers = dict(zip(SIDES, (before, after), strict=True))
        result = {
            "length": {side: fmean(a.tokens for a in given) for side, given in answers.items()},
            "unfinished": {
                side: fmean(not a.finished for a in given) for side, given in answers.items()
            },
            "kl": fmean(a - b for a, b in zip(now, then, strict=True)),
            "answers": len(after),
        }
        return result | (compare_answers(self.card.judge, before, after) if self.card.judge else {})

    def _measure_episodes(self) -> dict[str, Any]:
        folders = {side: self.run / "eval" / side for side in SIDES}
        rates = {side: self._pass_at_1(getattr(self, side), folders[side]) for side in SIDES}
        result: dict[str, Any] = {"pass_at_1": rates}
        if None not in rates.values():
            pair = compare_runs(folders["before"], folders["after"])
            result["gain"] = {"pass_at_1": pair["difference"], "ci95": list(pair["ci95"])}
        episodes = read_episodes(folders["after"] / "episodes.jsonl").values()
        return result | {"readiness": readiness(episodes, result.get("gain"))}

    def _pass_at_1(self, model: str, out: Path) -> float | None:
        plan = EvalPlan(
            make=factory(self.card.env, **self.card.env_settings),
            policy=f"hf:{model}",
            limit=self.card.tasks,
            samples=self.card.samples,
            out=out,
            sandbox=self.card.sandbox,
            seed=self.seed,
            chat=self.chat,
        )
        rate: float | None = evaluate(plan)["pass_at"].get("1")
        return rate


def compare_answers(
    judge_name: str, before: Sequence[SampledAnswer], after: Sequence[SampledAnswer]
) -> dict[str, Any]:
    """A judge's scores of two models' answers to the same prompts."""
    judge = open_judge(judge_name)
    scores = {
        side: judge([(each.prompt, each.message) for each in answers], Replies())
        for side, answers in zip(SIDES, (before, after), strict=True)
    }
    wins = [
        0.5 if new == old else float(new > old)
        for old, new in zip(scores["before"], scores["after"], strict=True)
        if old is not None and new is not None
    ]
    means: dict[str, float | None] = {}
    for side, values in scores.items():
        # An answer that was too long to be read has -inf; None means that the judge failed.
        finite = [value for value in values if value is not None and math.isfinite(value)]
        means[side] = fmean(finite) if finite else None
    version = depends_on(judge_name)
    return {
        "judge": means,
        "judged": len(wins),
        "win_rate": fmean(wins) if wins else None,
        **({"judge_by": version} if version else {}),
    }


def readiness(episodes: Iterable[Episode], gain: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Whether a policy is ready for reinforcement learning, from several episodes of each task.

    Args:
        gain: the paired difference of pass@1 to the model that the policy was made from, with its
            "ci95".

    Returns:
        "parsed": share of episodes without an unreadable call; "scored": share that infrastructure
        did not fail; "mixed": share of tasks with successes and failures, from which alone GRPO
        learns (None with one episode of each); "distinct": share of different episodes of a task;
        "pass_at_1", a mean over tasks; and "problems", in sentences: none where it is ready.
    """
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task.id].append(episode)
    played = [episode for group in groups.values() for episode in group]
    repeated = [group for group in groups.values() if len(group) > 1]
    passed = [[e.passed for e in group if e.passed is not None] for group in groups.values()]
    shares: dict[str, Any] = {
        "parsed": _mean(_is_parsed(episode) for episode in played),
        "scored": sum(map(len, passed)) / len(played) if played else 0.0,
        "mixed": _mean(len({e.passed for e in group} - {None}) > 1 for group in repeated),
        "distinct": _mean(len(set(map(_transcript, group))) / len(group) for group in repeated),
    }
    problems = [
        f"{name} is {shares[name]:.2f}, under {least}: {FIXES[name]}"
        for name, least in LEAST.items()
        if shares[name] is not None and shares[name] < least
    ]
    # Only a loss that the paired interval tells from chance: a fixed bound on the difference calls
    # an unchanged policy worse in a fifth of all stages.
    if gain is not None and gain["ci95"][1] < 0:
        problems.append(f"pass@1 fell by {-gain['pass_at_1']:.3f} ({_interval(gain['ci95'])})")
    pass_at_1 = _mean(fmean(map(bool, group)) for group in passed if group)
    return {"episodes": len(played), **shares, "pass_at_1": pass_at_1, "problems": problems}


def _is_parsed(episode: Episode) -> bool:
    return episode.counts.bad_calls == 0 and episode.end is not EndReason.FORMAT_ERROR


def _transcript(episode: Episode) -> str:
    return repr([(m.content, m.tool_calls) for m in episode.messages if m.role == "assistant"])


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _interval(ci95: Sequence[float]) -> str:
    return f"95 % {ci95[0]:+.3f} to {ci95[1]:+.3f}"


# --- in words


def summary(result: Mapping[str, Any]) -> str:
    """A stage's result for the terminal: a headline and a table of what changed."""
    lines = [f"{result['stage']}: {result['steps']} steps; model {result['model']}"]
    rows = [*_held_out_rows(result), *card_rows(result["card"])]
    if not rows:
        return f"{lines[0]}; nothing was held out"
    width = max(len(name) for name, *_ in rows)
    lines.append(f"  {'':{width}}  {'before':>9}  {'after':>9}")
    for name, before, after, remark in rows:
        cells = "".join(f"  {_number(value):>9}" for value in (before, after))
        lines.append(f"  {name:{width}}{cells}  {remark}".rstrip())
    problems = result["card"].get("readiness", {}).get("problems")
    if problems is not None:
        lines.append(
            "  " + ("not ready for RL: " + "; ".join(problems) if problems else "ready for RL")
        )
    return "\n".join(lines)


def _held_out_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    before, after = result.get("before", {}), result.get("after", {})
    # Before the first step a policy is its reference: all pairs tie, and no accuracy is 0.
    skipped = {"accuracy"} if before.get("ties") == 1 else set[str]()
    for name, value in after.items():
        if isinstance(value, float):
            yield name, None if name in skipped else before.get(name), value, ""


def card_rows(card: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, value before, value after and remark of each line of a card."""
    for name in ("pass_at_1", "judge", "length", "unfinished"):
        if name in card:
            gain = card.get("gain") if name == "pass_at_1" else None
            remark = f"{gain['pass_at_1']:+.3f} ({_interval(gain['ci95'])})" if gain else ""
            yield name, card[name]["before"], card[name]["after"], remark
    for name, count in (("kl", "answers"), ("win_rate", "judged")):
        if card.get(name) is not None:
            yield name, None, card[name], f"n={card[count]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
