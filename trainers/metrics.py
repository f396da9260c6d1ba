"""What every online run logs of its rollouts. All episodes count here, those that training will drop included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, EndReason


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, length, tools, endings and group statistics of one round.

    Means over episodes leave out what infrastructure failed; `episodes/failed_infra` counts that. A mean over nothing
    is left out of the result.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if episode.end.ending is not Ending.FAILED]
    metrics = {
        "episodes/total": float(len(episodes)),
        "episodes/failed_infra": float(len(episodes) - len(scored)),
        **_group_metrics(groups),
    }
    if not scored:
        return metrics
    mean = _mean_over(scored)
    rewards = [float(episode.reward or 0.0) for episode in scored]
    calls = sum(episode.counts.tool_calls for episode in scored)
    metrics |= {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "pass/train": mean(lambda episode: bool(episode.passed)),
        "episodes/truncated": mean(lambda episode: episode.truncated),
        "length/sampled_mean": mean(lambda episode: episode.counts.sampled_tokens),
        "length/turns_mean": mean(lambda episode: episode.counts.turns),
        "length/observed_share": _share(scored),
        "tools/calls_mean": mean(lambda episode: episode.counts.tool_calls),
        "tools/error_rate": sum(episode.counts.tool_errors for episode in scored) / max(1, calls),
        "format/bad_calls_rate": mean(lambda episode: episode.counts.bad_calls > 0),
    }
    endings = Counter(episode.end for episode in episodes)
    return metrics | {f"end/{reason.value}": endings[reason] / len(episodes) for reason in EndReason if endings[reason]}


def refill_metrics(groups: Sequence[Group], refilled: Sequence[Group]) -> dict[str, float]:
    """What dynamic sampling did: groups that took a place, episodes they cost, places that stayed empty."""
    if not refilled:
        return {}
    signal = sum(group.has_signal for group in (*groups, *refilled))
    return {
        "refill/groups": float(len(refilled)),
        "refill/episodes": float(sum(len(group.episodes) for group in refilled)),
        "refill/empty": float(max(0, len(groups) - signal)),
    }


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of groups that can teach nothing, and why."""
    total = max(1, len(groups))
    passes = [[episode.passed for episode in group.episodes if episode.passed is not None] for group in groups]
    return {
        "groups/total": float(len(groups)),
        "groups/no_signal": sum(not group.has_signal for group in groups) / total,
        "groups/all_pass": sum(bool(group) and all(group) for group in passes) / total,
        "groups/all_fail": sum(bool(group) and not any(group) for group in passes) / total,
    }


def _mean_over(episodes: Sequence[Episode]) -> Callable[[Callable[[Episode], float]], float]:
    return lambda value: fmean(float(value(episode)) for episode in episodes)


def _share(episodes: Sequence[Episode]) -> float:
    """Share of the tokens that the policy did not write."""
    sampled = sum(episode.counts.sampled_tokens for episode in episodes)
    read = sum(episode.counts.prompt_tokens for episode in episodes)
    return read / max(1, sampled + read)
