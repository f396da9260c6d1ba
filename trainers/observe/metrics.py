"""Every number that an online run logs: of its episodes, its groups, its batches, its updates and
its time.

Functions are pure and return names -> numbers; `UpdateLog` gathers those of the optimizer steps and
`RoundClock` the seconds. All episodes count, those included that training drops. A mean over
nothing is left out. docs/trainers.md has a table of all names with units and meanings.

Letters: B rows, T positions, E episodes, N trained tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from agentrl.engines.routing import Replay
from agentrl.evaluation.summary import error_kind, tool_counts
from agentrl.trainers.algorithms.losses import add_metrics, drop_recorded_tokens
from agentrl.trainers.batch import OUTCOMES, PolicyOutput, Rewards, TokenBatch
from agentrl.trainers.observe.parity import (
    ParityCheck,
    Tokens,
    gap_metrics,
    ratio_metrics,
    trained_tokens,
)
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, EndReason

Quiet = Literal["infrastructure", "too_few", "all_pass", "truncated", "all_fail", "equal_partial"]
"""Why a group gives no signal, the first that holds: no episode was scored; too few were; all
passed; a limit cut all short and none passed; all failed with a reward of 0 or less; else all
have an equal part of the reward."""

MOST_PARTS = 32
BINS = ("below_0", "0", "part", "1", "above_1")
"""Where an outcome lies: below 0, at it, between 0 and 1, at 1, above."""

QUIET: tuple[Quiet, ...] = get_args(Quiet)

TURNS = 8
"""Turns that are shown one by one; later ones are added up."""

_MEANS = {
    "loss": "policy/loss",
    "entropy": "policy/entropy",
    "approx_kl": "policy/kl",
    "ref_kl": "policy/ref_kl",
    "teacher_kl": "policy/teacher_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "rejected": "policy/rejected",
    "grad_norm": "policy/grad_norm",
}


def rollout_metrics(groups: Sequence[Group], rewards: Rewards = OUTCOMES) -> dict[str, float]:
    """Reward, length, tools, endings and group statistics of one round.

    Means over episodes leave out what infrastructure failed; `episodes/failed_infra` counts that.

    Args:
        rewards: which of them train, and by which signal is decided.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if episode.end.ending is not Ending.FAILED]
    metrics = {
        "episodes/total": float(len(episodes)),
        "episodes/failed_infra": float(len(episodes) - len(scored)),
        **group_metrics(groups, rewards),
    }
    if not episodes:
        return metrics
    endings = Counter(episode.end for episode in episodes)
    metrics |= {
        f"end/{reason.value}": endings[reason] / len(episodes)
        for reason in EndReason
        if endings[reason]
    }
    metrics["episodes/timeout"] = (endings[EndReason.WALL_TIME] + endings[EndReason.TIMEOUT]) / len(
        episodes
    )
    if not scored:
        return metrics
    mean = _mean_over(scored)
    return metrics | {
        **_rewards(scored),
        "pass/train": mean(lambda episode: bool(episode.passed)),
        "episodes/truncated": mean(lambda episode: episode.truncated),
        "length/sampled_mean": mean(lambda episode: episode.counts.sampled_tokens),
        "length/sampled_max": float(max(episode.counts.sampled_tokens for episode in scored)),
        "length/turns_mean": mean(lambda episode: episode.counts.turns),
        "length/observed_share": _observed_share(scored),
        "format/bad_calls_rate": mean(lambda episode: episode.counts.bad_calls > 0),
        **tool_metrics(scored),
        **safety_metrics(scored),
    }


class RoundDraws(NamedTuple):
    """What dynamic sampling made of one round.

    Attributes:
        groups: of the round's own tasks.
        carried: of earlier rounds, that took places.
        refilled: of later draws, that took places.
        spare: of later draws, that found none.
        expired: of earlier rounds, that were given up.
    """

    groups: Sequence[Group]
    carried: Sequence[Group]
    refilled: Sequence[Group]
    spare: Sequence[Group]
    expired: Sequence[Group]

    def metrics(self, rewards: Rewards = OUTCOMES) -> dict[str, float]:
        """Groups that took a place and whence, episodes that were played for it, places that stayed
        empty, the share thrown away, and where outcomes lie before and after.
        """
        quiet = [group for group in self.groups if not rewards.has_signal(group)]
        idle = [group for group in self.spare if not rewards.has_signal(group)]
        own = [group for group in self.groups if rewards.has_signal(group)]
        replacing = (*self.carried, *self.refilled)
        sampled = (*self.groups, *self.refilled, *self.spare)
        thrown = (*quiet, *idle, *self.expired)
        return {
            "refill/groups": float(len(self.refilled)),
            "refill/carried": float(len(self.carried)),
            "refill/episodes": float(_episodes((*self.refilled, *self.spare))),
            "refill/empty": float(len(quiet) - len(replacing)),
            "refill/thrown_share": _episodes(thrown) / max(1, _episodes(sampled)),
            **reward_histogram("sampled", sampled),
            **reward_histogram("trained", (*own, *replacing)),
        }


def reward_histogram(what: str, groups: Sequence[Group]) -> dict[str, float]:
    """`reward/<what>_<bin>`: share of scored episodes whose outcome lies in each of the `BINS`."""
    found = [reward for group in groups for reward in _rewards_of(group)]
    bins = Counter(_bin(reward) for reward in found)
    return {f"reward/{what}_{name}": bins[name] / len(found) for name in BINS if found}


def _bin(reward: float) -> str:
    if reward in (0.0, 1.0):
        return str(int(reward))
    return "below_0" if reward < 0 else "part" if reward < 1 else "above_1"


def _episodes(groups: Sequence[Group]) -> int:
    return sum(len(group.episodes) for group in groups)


def group_metrics(groups: Sequence[Group], rewards: Rewards = OUTCOMES) -> dict[str, float]:
    """Shares of groups that can teach nothing, and why; the spread of rewards and the mean reward
    of those that can.
    """
    total = max(1, len(groups))
    passes = [
        [episode.passed for episode in group.episodes if episode.passed is not None]
        for group in groups
    ]
    why = Counter(quiet_reason(group, rewards) for group in groups)
    metrics = {
        "groups/total": float(len(groups)),
        "groups/no_signal": (len(groups) - why[None]) / total,
        "groups/all_pass": sum(bool(group) and all(group) for group in passes) / total,
        "groups/all_fail": sum(bool(group) and not any(group) for group in passes) / total,
        **{f"groups/quiet_{reason}": why[reason] / total for reason in QUIET},
    }
    if spreads := [pstdev(found) for group in groups if len(found := _rewards_of(group)) > 1]:
        metrics["groups/reward_std_mean"] = fmean(spreads)
    kept = [group for group in groups if rewards.has_signal(group)]
    if earned := [reward for group in kept for reward in _rewards_of(group)]:
        metrics["reward/kept_mean"] = fmean(earned)
        passed = [one.passed for group in kept for one in group.episodes if one.passed is not None]
        metrics["pass/kept"] = fmean(map(bool, passed))
    return metrics


def quiet_reason(group: Group, rewards: Rewards = OUTCOMES) -> Quiet | None:
    """Why the group has no signal; None if it has."""
    if rewards.has_signal(group):
        return None
    scored = [episode for episode in group.episodes if episode.reward is not None]
    if not scored:
        return "infrastructure"
    if len(scored) < rewards.fewest:
        return "too_few"
    passed = sum(bool(episode.passed) for episode in scored)
    if passed == len(scored):
        return "all_pass"
    if not passed and all(episode.truncated for episode in scored):
        return "truncated"
    return "all_fail" if not passed and _rewards_of(group)[0] <= 0 else "equal_partial"


def tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Tool calls, how many of them failed and how many timed out; calls and success of every tool
    by name.
    """
    calls = sum(episode.counts.tool_calls for episode in episodes)
    late = sum(
        message.role == "tool" and error_kind(message.content) == "timeout"
        for episode in episodes
        for message in episode.messages
    )
    metrics = {
        "tools/calls_mean": calls / len(episodes),
        "tools/error_rate": sum(episode.counts.tool_errors for episode in episodes) / max(1, calls),
        "tools/timeout_rate": late / max(1, calls),
    }
    for name, counts in tool_counts(episodes).items():
        metrics[f"tools/calls/{name}"] = float(counts["calls"])
        metrics[f"tools/success/{name}"] = 1 - counts["errors"] / counts["calls"]
    return metrics


def safety_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Share of measured episodes with side effects, and of episodes in which a guard denied a call;
    each is left out where nobody looked.
    """
    metrics = {}
    if measured := [one for one in episodes if one.side_effects is not None]:
        changed = sum(bool(one.side_effects) for one in measured)
        metrics["side_effects/rate"] = changed / len(measured)
    if guarded := [one for one in episodes if one.events]:
        metrics["safety/denied_rate"] = sum(one.counts.denied > 0 for one in guarded) / len(guarded)
    return metrics


def prompt_of(group: Group) -> str:
    """A fingerprint of what the agent is given, instruction and files: tasks that differ in their
    id alone share it.
    """
    told = json.dumps([group.task.instruction, group.task.files], sort_keys=True)
    return hashlib.blake2b(told.encode(errors="backslashreplace"), digest_size=8).hexdigest()


def repeat_metrics(groups: Sequence[Group], seen: Collection[str]) -> dict[str, float]:
    """`groups/repeated`: share of the groups whose prompt was played before, in an earlier round or
    in this one.

    Args:
        seen: `prompt_of` every group of the earlier rounds.
    """
    prompts = [prompt_of(group) for group in groups]
    fresh = {prompt for prompt in prompts if prompt not in seen}
    return {"groups/repeated": 1 - len(fresh) / len(prompts)} if prompts else {}


def held_out_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """`eval/…` of what `evaluation.summary.summarize` returned; an unknown pass@k is left out."""
    failed = float(result["n_failed_infra"])
    metrics = {"eval/failed_infra": failed, "eval/n_scored": result["n_episodes"] - failed}
    for k, value in result["pass_at"].items():
        if value is not None:
            low, high = result["ci95"][k]
            end = "" if k == "1" else f"_at_{k}"
            metrics |= {
                f"eval/pass_at_{k}": value,
                f"eval/ci95{end}_low": low,
                f"eval/ci95{end}_high": high,
            }
    return metrics


def to_read(groups: Sequence[Group], seed: int, count: int = 2) -> dict[str, list[Episode]]:
    """Scored episodes of a round to be read by people: the best rewarded, and a random few of the
    others.

    Curves do not show reward hacking, readers do; the top alone would hide what is usual.

    Args:
        seed: of the draw.
        count: episodes of each kind.
    """
    scored = [
        episode for group in groups for episode in group.episodes if episode.reward is not None
    ]
    ranked = sorted(scored, key=lambda episode: -(episode.reward or 0.0))
    top, others = ranked[:count], ranked[count:]
    return {"top": top, "random": random.Random(seed).sample(others, min(count, len(others)))}


def _rewards(scored: Sequence[Episode]) -> dict[str, float]:
    rewards = [float(episode.reward or 0.0) for episode in scored]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/max": max(rewards),
        **_parts(scored),
    }


def _parts(scored: Sequence[Episode]) -> dict[str, float]:
    """Means of the parts of scores, each over the episodes that have it."""
    found = Counter(name for episode in scored for name in episode.score.parts)
    return {
        f"reward/part/{name}": fmean(
            episode.score.parts[name] for episode in scored if name in episode.score.parts
        )
        for name, _ in found.most_common(MOST_PARTS)
    }


def _rewards_of(group: Group) -> list[float]:
    return [reward for reward in group.rewards_G if reward is not None]


def _mean_over(episodes: Sequence[Episode]) -> Callable[[Callable[[Episode], float]], float]:
    return lambda value: fmean(float(value(episode)) for episode in episodes)


def _observed_share(episodes: Sequence[Episode]) -> float:
    """Share of the tokens that the policy did not write."""
    sampled = sum(episode.counts.sampled_tokens for episode in episodes)
    read = sum(episode.counts.prompt_tokens for episode in episodes)
    return read / max(1, sampled + read)


# --- batches


def token_metrics(batch: TokenBatch) -> dict[str, float]:
    """Shares of the tokens that are read, by who wrote them: the prompt (before the first sampled
    turn), the policy (sampled; reread where an earlier branch trains it), or a tool or user
    (observed).
    """
    return _shares("tokens", [(_roles(batch), batch.attention_BT.double())])


def gradient_metrics(trained: Sequence[TokenBatch]) -> dict[str, float]:
    """Shares by role and by turn of the gradient. A token counts by |weight · advantage|, whether
    or not the mask lets it through: any share but that of sampled tokens is an error.

    Args:
        trained: the batches of a round's optimizer steps, corrected, before `informative`.
    """
    parts = list[tuple[dict[str, Tensor], Tensor]]()
    for batch in trained:
        push_BT = batch.advantages_BT.nan_to_num().abs().double()
        if batch.weights_BT is not None:
            push_BT = push_BT * batch.weights_BT.nan_to_num()
        turns = {f"turn_{turn}": batch.turn_BT == turn for turn in range(TURNS)}
        turns[f"turn_{TURNS}_on"] = batch.turn_BT >= TURNS
        parts.append((_roles(batch) | turns, push_BT))
    shares = _shares("gradient", parts)
    return {name: share for name, share in shares.items() if share or "turn" not in name}


def staleness_metrics(batch: TokenBatch, version: int) -> dict[str, float]:
    """Updates between the weights that sampled a trained token and those that are trained now.

    Args:
        version: of the weights that the update starts from.
    """
    own_BT = batch.mask_BT & (batch.version_BT >= 0)
    if not own_BT.any():
        return {}
    age_N = (version - batch.version_BT[own_BT]).double()
    shares = {f"staleness/share_{age}": float((age_N == age).double().mean()) for age in range(4)}
    shares["staleness/share_4_on"] = float((age_N >= 4).double().mean())
    return {"staleness/mean": float(age_N.mean()), "staleness/max": float(age_N.max()), **shares}


def lost_reward_metrics(packed: TokenBatch, trained: Sequence[TokenBatch]) -> dict[str, float]:
    """Reward that was earned by tokens which do not train: masked, filtered with their group, or of
    weight 0.

    `reward/lost_share`: Σ|R|·(share of the episode's tokens that do not train) / Σ|R|; one that
    sampled nothing loses all. `reward/lost_mean`: mean reward of the episodes that lost every
    token, which shows whether a filter takes the good ones or the bad ones. `episodes/untrained`:
    their share. All over the scored episodes of the round's own groups, those that refill it left
    out.

    Args:
        packed: the round as it came from `pack`.
        trained: the batches of its optimizer steps, corrected, before `informative`.
    """
    live_E = torch.zeros_like(packed.reward_E, dtype=torch.float64)
    for step in trained:
        live_BT = step.mask_BT if step.weights_BT is None else step.mask_BT & (step.weights_BT != 0)
        live_E.index_add_(
            0, step.episode_B.to(live_E.device), live_BT.sum(1).double().to(live_E.device)
        )
    own = len(live_E) - packed.n_refilled
    reward_E, live_E, tokens_E = (
        full_E[:own].double() for full_E in (packed.reward_E, live_E, packed.tokens_E)
    )
    if not own:
        return {}
    none_E = live_E == 0
    metrics = {"episodes/untrained": float(none_E.double().mean())}
    if total := float(reward_E.abs().sum()):
        metrics["reward/lost_share"] = (
            float((reward_E.abs() * (1 - live_E / tokens_E.clamp(min=1))).sum()) / total
        )
    if none_E.any():
        metrics["reward/lost_mean"] = float(reward_E[none_E].mean())
    return metrics


def _roles(batch: TokenBatch) -> dict[str, Tensor]:
    """Role -> mask (B, T) of the tokens that it wrote."""
    turn_BT = batch.turn_BT >= 0
    began_BT = turn_BT.int().cumsum(1) > 0
    read_BT = batch.attention_BT & ~turn_BT
    return {
        "sampled": batch.mask_BT,
        "reread": turn_BT & ~batch.mask_BT,
        "prompt": read_BT & ~began_BT,
        "observed": read_BT & began_BT,
    }


def _shares(kind: str, parts: Sequence[tuple[dict[str, Tensor], Tensor]]) -> dict[str, float]:
    """For each batch, where the amounts are that a name is about, and the amounts (B, T) -> shares
    of all of them.
    """
    total = sum(float(amount_BT.sum()) for _, amount_BT in parts)
    if not total:
        return {}
    names = parts[0][0]
    return {
        f"{kind}/{name}": sum(float(amount[where[name]].sum()) for where, amount in parts) / total
        for name in names
    }


# --- updates


def fresh(batch: TokenBatch) -> TokenBatch:
    """The batch without the tokens of earlier versions: on those, sampler and trainer differ by
    what was learned since.
    """
    if batch.version is None:
        return batch
    return replace(batch, mask_BT=batch.mask_BT & (batch.version_BT >= batch.version))


class UpdateLog:
    """The metrics of one round's updates.

    Args:
        packed: the round as `pack` made it.
        batch: the same with its advantages.
        version: of the weights that the round starts from.
        parity: judges the gap to the sampler and the ratios.
    """

    def __init__(
        self,
        packed: TokenBatch,
        batch: TokenBatch,
        version: int,
        parity: ParityCheck | None = None,
    ) -> None:
        self._packed, self._parity = packed, parity
        self.row = token_metrics(batch) | staleness_metrics(batch, version)
        self.steps: list[dict[str, float]] = []
        self._trained: list[TokenBatch] = []
        self._tokens: list[Tokens] = []
        self._fresh: list[Tokens] = []
        self._parts: list[dict[str, float]] = []
        self._replays: list[Replay] = []

    def add_micro_batch(
        self, output: PolicyOutput, micro: TokenBatch, metrics: dict[str, float], replay: Replay
    ) -> None:
        """Note the policy's output for a micro-batch, the metrics of its loss, and what replaying
        the sampler's experts changed.
        """
        self._parts.append(metrics)
        self._replays.append(replay)
        self._tokens.append(trained_tokens(output, drop_recorded_tokens(micro)))
        if not self.steps:
            self._fresh.append(trained_tokens(output, fresh(micro)))

    def end_minibatch(self, mini: TokenBatch, grad_norm: float) -> dict[str, float]:
        """Join the metrics of a minibatch after its backward pass; the gap of the first one is
        judged before any update.

        Raises:
            ParityError: sampler and trainer disagree.
        """
        metrics = add_metrics(self._parts)
        metrics |= {"grad_norm": grad_norm, "updates": 0.0}
        if not self.steps:
            own, gap = fresh(mini), gap_metrics(self._fresh)
            if own.mask_BT.equal(mini.mask_BT):  # else what was learned since is cut too
                gap["parity/cut"] = metrics["clip_low"] + metrics["clip_high"]
            if self._parity is not None:
                self._parity.judge_gap(gap, own)
            metrics |= gap | routing_metrics(self._replays)
        self.steps.append(metrics)
        self._parts, self._replays = [], []
        return metrics

    def add_trained(self, mini: TokenBatch, n_episodes: int) -> None:
        """Note what a minibatch trained on; later epochs of the same episodes add nothing."""
        if sum(batch.n_episodes for batch in self._trained) < n_episodes:
            self._trained.append(mini)

    def metrics(self) -> dict[str, float]:
        """Return all of them."""
        ratios = ratio_metrics(self._tokens)
        if self._parity is not None:
            self._parity.judge_ratios(ratios)
        return {
            **self.row,
            **step_means(self.steps),
            **ratios,
            **gradient_metrics(self._trained),
            **lost_reward_metrics(self._packed, self._trained),
        }


def routing_metrics(replays: Sequence[Replay]) -> dict[str, float]:
    """`parity/experts_differ`: of the choices of experts that were replayed (a token in a layer),
    the share that the trainer would have made otherwise; nothing where none was.
    """
    replayed = float(sum(replay.replayed for replay in replays))
    differ = float(sum(replay.differ for replay in replays))
    return {"parity/experts_differ": differ / replayed} if replayed else {}


def step_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a round.

    The gap between sampler and trainer is that of the first step, before any update.
    """
    if not steps:
        return {"policy/updates": 0.0}
    metrics = {
        name: sum(step[key] for step in steps) / len(steps)
        for key, name in _MEANS.items()
        if key in steps[0]
    }
    metrics |= {name: value for name, value in steps[0].items() if name.startswith("parity/")}
    metrics["policy/ratio_max"] = max(step["ratio_max"] for step in steps)
    return metrics | {"policy/updates": sum(step["updates"] for step in steps)}


# --- time


class RoundClock:
    """Seconds of the parts of a round; it starts when it is made, and each `lap` ends one part."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds = {"rollout": 0.0, "update": 0.0, "eval": 0.0}

    def lap(self, part: str) -> None:
        """End a part: the seconds since the last one belong to it."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def metrics(
        self, groups: Sequence[Group], trained_tokens: int, queue: int = 0
    ) -> dict[str, float]:
        """Return the `time/…` of a round: all that no two runs have in common.

        Args:
            groups: all that were played.
            trained_tokens: tokens of the round that train.
            queue: finished groups that wait for the trainer.
        """
        rollout_s, update_s = self._seconds["rollout"], self._seconds["update"]
        round_s = max(rollout_s + update_s, 1e-9)
        sampled = sum(e.counts.sampled_tokens for group in groups for e in group.episodes)
        return {
            **{f"time/{part}_s": seconds for part, seconds in self._seconds.items()},
            "time/rollout_tokens_per_s": sampled / max(rollout_s, 1e-9),
            "time/trainer_idle": rollout_s / round_s,
            "time/queue": float(queue),
            "time/tokens_per_s": trained_tokens / round_s,
        }
