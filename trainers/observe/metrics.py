"""What every online run logs of its rollouts. All episodes count here, those that training will
drop included.

Every name stands with unit and meaning in the table of docs/trainers.md. A mean over nothing is
left out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple, get_args

from agentrl.evaluation.outcomes import error_kind, tool_counts
from agentrl.trainers.rewards import OUTCOMES, Rewards
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
        "length/observed_share": _share(scored),
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
    """Why the group has no signal; None where it has."""
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


def system_metrics(
    groups: Sequence[Group], *, waited_s: float, round_s: float, queue: int
) -> dict[str, float]:
    """How well the machine is used; times begin with `time/`, as no two runs have the same.

    Args:
        waited_s: seconds in which the trainer waited for rollouts.
        round_s: seconds of the whole round.
        queue: finished groups that wait for the trainer.
    """
    sampled = sum(episode.counts.sampled_tokens for group in groups for episode in group.episodes)
    return {
        "time/rollout_tokens_per_s": sampled / max(waited_s, 1e-9),
        "time/trainer_idle": waited_s / max(round_s, 1e-9),
        "time/queue": float(queue),
    }


def held_out_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """`eval/…` of what `agentrl.evaluation.passk.summarize` returned; a pass@k that is not known is
    left out.
    """
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


def _share(episodes: Sequence[Episode]) -> float:
    """Share of the tokens that the policy did not write."""
    sampled = sum(episode.counts.sampled_tokens for episode in episodes)
    read = sum(episode.counts.prompt_tokens for episode in episodes)
    return read / max(1, sampled + read)
