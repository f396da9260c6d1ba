"""How likely an episode passes from the end of each of its turns, by playing on from there: the
labels of process reward models. `agentrl label` runs it.

Math-Shepherd (https://arxiv.org/abs/2312.08935): from each step a policy completes the solution N
times; the soft estimate of the step is the share that is right, the hard one whether any is. Here a
step is a turn of any environment. Its tools run again in a fresh sandbox, its tokens stay as they
were sampled. After the last turn nothing is left to play: its label is whether the episode passed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.chat.settings import ChatSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.plan import LOADED, claim, fingerprint_of
from agentrl.evaluation.recorded_guard import as_recorded, recorded_guard
from agentrl.evaluation.regrade import RegradePlan, recorded_tasks, why_skipped
from agentrl.evaluation.run import EvalPlan, chat_of, close_policy, open_policy
from agentrl.policies.base import TokenPolicy
from agentrl.policies.continued import Continued
from agentrl.records.files import RowWriter, read_episodes, read_plain_rows, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.rows import messages_row
from agentrl.rollout.play import Setting, play
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.trajectory import Episode, EpisodeKey
from agentrl.types import Ending, Task, ToolSpec

if TYPE_CHECKING:
    from agentrl.chat.tokens import Chat

LABELS = "labels.jsonl"
CONCURRENCY = 64
"""Episodes that play at the same time."""
_APART = 1_000_003
"""Between the sample numbers of two completions of one episode. Recordings have fewer samples of a
task, so no completion of one sample has the number, and with it the seed, of another's."""


@dataclass(frozen=True)
class LabelPlan:
    """What is labelled, and by whom.

    Attributes:
        run: folder of an evaluation or a training run, whose policy sampled tokens; or its
            `episodes.jsonl`.
        policy: goes on from each turn: `hf:MODEL` or `vllm:MODEL`, of the recording's tokenizer.
        out: folder of `labels.jsonl` and `label.json`.
        completions: episodes from each turn.
        limit: at most so many episodes of the run, the first; 0: all.
        env: environment; by default the one that the run names.
        settings: of the environment; they change those that the run names.
    """

    run: Path
    policy: str
    out: Path
    completions: int = 8
    limit: int = 0
    temperature: float = 1.0
    env: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    sandbox: str = "auto"
    chat: ChatSettings = field(default_factory=ChatSettings)

    def __post_init__(self) -> None:
        if self.completions < 1:
            raise ConfigError(f"--completions {self.completions} must be at least 1")
        if self.limit < 0:
            raise ConfigError(f"--limit {self.limit} must not be negative")
        if self.policy.partition(":")[0] not in LOADED:
            raise ConfigError(
                f"--policy {self.policy!r} cannot go on from recorded tokens: use hf:MODEL or"
                " vllm:MODEL"
            )
        if self.run.name == "episodes.jsonl" and self.run.is_file():
            object.__setattr__(self, "run", self.run.parent)
        if not (self.run / "episodes.jsonl").is_file():
            raise ConfigError(
                f"{self.run} holds no episodes.jsonl: give the folder of an evaluation or a"
                " training run"
            )


class _Work(NamedTuple):
    """One episode whose turns are labelled, its task, the seed of its run, and how many messages
    came before the policy's first turn.
    """

    episode: Episode
    task: Task
    seed: int
    opening: int

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(one.role == "assistant" for one in self.episode.messages[self.opening :])


def label_turns(
    plan: LabelPlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Label every turn of a run's episodes; the same call goes on where it was interrupted.

    A row of `labels.jsonl` is an episode: `messages`, `opening` (how many of them came before its
    first turn), and one value per turn in `labels` (the soft estimate; None where infrastructure
    failed every completion), `passed`, `scored` and `failed` (completions). The safety policy of
    the run stands around the calls of the completions, too.

    Args:
        progress: is told how many completions are played, and of how many.

    Returns:
        what `label.json` holds: "run", "env", "policy", "labels" (the file), "n_episodes",
        "n_turns", "n_completions", "n_failed_infra", "n_unknown" (turns without a label), "mean",
        "skipped" (reason -> episodes).

    Raises:
        ConfigError: the run or a part of it cannot be found, or `out` holds other labels.
        UserError: no episode can be labelled, or its safety policy cannot be had.
    """
    episodes = list(read_episodes(plan.run / "episodes.jsonl").values())
    guard = recorded_guard(plan.run, episodes)
    env_id, make, works, skipped = _works(plan, episodes[: plan.limit or None])
    with owned(plan.out):
        path = plan.out / LABELS
        done = _done(path, {one.key: _fingerprint(one) for one in episodes})
        claim(plan.out, _identity(plan, env_id), "labels")
        due = [work for work in works if work.episode.key not in done]
        if due:
            pool = pool_for(make(), plan.sandbox)
            setting = Setting(make, _policy(plan, make), pool, run="label", guard=guard)
            _play_all(plan, setting, due, path, progress)
        result = {
            "run": str(plan.run),
            "env": env_id,
            "policy": plan.policy,
            "labels": str(path),
            **_counted(read_plain_rows(path)),
            "skipped": dict(Counter(skipped.values())),
        }
        write_json_atomic(plan.out / "label.json", result)
    return result


def _works(
    plan: LabelPlan, episodes: Sequence[Episode]
) -> tuple[str, Callable[[], ToolEnv], list[_Work], dict[EpisodeKey, str]]:
    """The environment's id, what makes it, what is labelled, and why the rest is not.

    Raises:
        UserError: nothing can be labelled.
    """
    source = RegradePlan(plan.run, plan.env, plan.settings, plan.sandbox)
    env_id, make, found = recorded_tasks(source, episodes)
    skipped = {one.key: why for one in episodes if (why := why_skipped(one, found) or _mute(one))}
    kept = [one for one in episodes if one.key not in skipped]
    chat, tools = (chat_of(plan.policy, plan.chat) if kept else None), make().tools
    works: list[_Work] = []
    for one in kept:
        assert chat is not None
        opening = _opening(one, chat, tools)
        if opening is None:
            skipped[one.key] = f"sampled with another tokenizer or template than {plan.policy} has"
        else:
            works.append(_Work(one, *found[one.task.id], opening))
    if not works:
        reasons = "; ".join(f"{n} {why}" for why, n in Counter(skipped.values()).items())
        raise UserError(f"{plan.run}: none of {len(episodes)} episodes can be labelled: {reasons}")
    return env_id, make, works, skipped


def _opening(episode: Episode, chat: Chat, tools: Sequence[ToolSpec]) -> int | None:
    """Messages before the policy's first turn, by the tokens that it read: an environment may begin
    with messages of an assistant; None where these are other tokens here.
    """
    read, messages = episode.trajectories[0].segments[0].ids, episode.messages
    for at in range(1, len(messages)):
        begins = messages[at].role == "assistant" != messages[at - 1].role
        if begins and tuple(chat.prompt_ids(messages[:at], tools)) == read:
            return at
    return None


def _done(path: Path, known: Mapping[EpisodeKey, str]) -> set[EpisodeKey]:
    """The episodes whose labels are there.

    Raises:
        ConfigError: a row is of another episode than the run holds.
    """
    rows = read_plain_rows(path) if path.exists() else []
    for row in rows:
        if known.get(EpisodeKey(*row["key"])) != row.get("episode"):
            raise ConfigError(
                f"{path} holds labels of another episode {'/'.join(map(str, row['key']))} than the"
                " run does: choose another --out"
            )
    return {EpisodeKey(*row["key"]) for row in rows}


def _policy(plan: LabelPlan, make: Callable[[], ToolEnv]) -> TokenPolicy:
    policy = open_policy(
        EvalPlan(make, plan.policy, temperature=plan.temperature, chat=plan.chat), make()
    )
    assert isinstance(policy, TokenPolicy)
    return policy


def _play_all(
    plan: LabelPlan,
    setting: Setting,
    due: Sequence[_Work],
    path: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Play and write, and close the policy however that ends."""
    rollouts = Rollouts(setting)
    try:
        try:
            with RowWriter(path) as writer:
                rollouts.run(_Labels(plan, setting, writer, progress).all(due))
        finally:
            rollouts.run(close_policy(setting.policy))
    finally:
        rollouts.close()


class _Labels:
    """Plays on from turns, and writes an episode's row once all of its turns are known."""

    def __init__(
        self,
        plan: LabelPlan,
        setting: Setting,
        writer: RowWriter,
        progress: Callable[[int, int], None],
    ) -> None:
        self._plan, self._setting, self._writer = plan, setting, writer
        self._progress = progress
        self._room = asyncio.Semaphore(CONCURRENCY)
        self._done = 0
        self._diverged: dict[EpisodeKey, int] = {}

    async def all(self, due: Sequence[_Work]) -> None:
        """Label these episodes.

        Raises:
            UserError: the first that one of them met.
        """
        total = sum(work.turns - 1 for work in due) * self._plan.completions
        self._progress(0, total)
        try:
            async with asyncio.TaskGroup() as playing:
                for work in due:
                    playing.create_task(self._one(work, total))
        except BaseExceptionGroup as group:
            told = (one for one in group.exceptions if isinstance(one, UserError))
            raise next(told, group) from None

    async def _one(self, work: _Work, total: int) -> None:
        numbers = range(self._plan.completions)
        found = await asyncio.gather(
            *(
                asyncio.gather(*(self._complete(work, turn, n, total) for n in numbers))
                for turn in range(1, work.turns)
            )
        )
        outcomes = [*found, [work.episode.passed]]
        passed = [sum(one is True for one in turn) for turn in outcomes]
        scored = [sum(one is not None for one in turn) for turn in outcomes]
        self._writer.write(
            {
                "key": list(work.episode.key),
                "episode": _fingerprint(work.episode),
                "env": work.episode.env,
                "task": work.task.id,
                "messages": messages_row(work.episode.messages),
                "opening": work.opening,
                "labels": [p / n if n else None for p, n in zip(passed, scored, strict=True)],
                "passed": passed,
                "scored": scored,
                "failed": [sum(one is None for one in turn) for turn in outcomes],
            }
        )

    async def _complete(self, work: _Work, turn: int, number: int, total: int) -> bool | None:
        """Whether one episode that goes on after so many turns passes; None where infrastructure
        failed it twice.
        """
        async with self._room:
            passed = await self._go_on(work, turn, number)
        self._done += 1
        self._progress(self._done, total)
        return passed

    async def _go_on(self, work: _Work, turn: int, number: int) -> bool | None:
        own = work.episode.key
        assert isinstance(self._setting.policy, TokenPolicy)
        policy = Continued(self._setting.policy, work.episode, turn)
        guard = as_recorded(self._setting.guard, work.episode, turn)
        setting = replace(self._setting, policy=policy, seed=work.seed, guard=guard)
        sample = own.sample + (turn * self._plan.completions + number + 1) * _APART
        for attempt in range(2):
            if turn >= self._diverged.get(own, turn + 1):
                break  # it would meet the same answer
            key = own._replace(run="label", sample=sample, attempt=attempt)
            played = await play(setting, work.task, key)
            if played.end.ending is not Ending.FAILED:
                return played.passed
            if policy.diverged:
                self._diverged[own] = min(turn, self._diverged.get(own, turn))
        return None


def _identity(plan: LabelPlan, env: str) -> dict[str, Any]:
    """What the labels depend on."""
    from agentrl.engines.loading import find_model

    return {
        "env": env,
        "settings": dict(plan.settings),
        "policy": plan.policy,
        "model": fingerprint_of(find_model(plan.policy.partition(":")[2])),
        "completions": plan.completions,
        "temperature": plan.temperature,
        "chat": plan.chat.model_dump(mode="json"),
        "tasks": {},
    }


def _fingerprint(episode: Episode) -> str:
    """What tells an episode from others of its key: another run may have been put in its place."""
    ids = [branch.ids for branch in episode.trajectories]
    told = json.dumps([messages_row(episode.messages), ids, episode.passed])
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def _mute(episode: Episode) -> str:
    """Why nothing can go on from an episode's tokens; empty if it can."""
    if episode.passed is None or not any(one.role == "assistant" for one in episode.messages):
        return "holds no turn of the policy"
    return "" if episode.trajectories else "its policy left no tokens"


def _counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    labels = [label for row in rows for label in row["labels"]]
    known = [label for label in labels if label is not None]
    return {
        "n_episodes": len(rows),
        "n_turns": len(labels),
        "n_completions": sum(sum(row["scored"][:-1]) for row in rows),
        "n_failed_infra": sum(sum(row["failed"]) for row in rows),
        "n_unknown": len(labels) - len(known),
        "mean": sum(known) / len(known) if known else None,
    }
