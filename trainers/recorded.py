"""Recorded episodes that train together with those that the policy plays: the fixed data of GKD
(https://arxiv.org/abs/2306.13649).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.records.files import iter_episodes
from agentrl.rollout.play import derive_seed
from agentrl.trainers.algorithms.distillation import TeacherSettings
from agentrl.trajectory import Episode

_PLAY = "play them with `agentrl eval ENV --policy hf:TEACHER --split train --out DIR`"


class RecordedEpisodes:
    """Recorded episodes for the rounds of a run.

    Args:
        settings: file and share; without a share there are no episodes.
        seed: for the draws.

    Raises:
        UserError: the file cannot be read, or no episode in it has a score and sampled tokens.
    """

    def __init__(self, settings: TeacherSettings, seed: int) -> None:
        self._share, self._seed = settings.share, seed
        self._setting = f"teacher.episodes={settings.episodes!r}"
        file = Path(settings.episodes)
        file = file / "episodes.jsonl" if file.is_dir() else file
        if settings.share and not file.is_file():
            raise UserError(f"{self._setting}: there is no file {file}: {_PLAY}")
        episodes = self._read(file) if settings.share else []
        self._episodes = [
            episode
            for episode in episodes
            if episode.passed is not None and any(t.trained for t in episode.trajectories)
        ]
        if episodes and not self._episodes:
            raise UserError(
                f"{self._setting}: none of {len(episodes)} episodes has a score and sampled"
                f" tokens: {_PLAY}"
            )

    def check(self, envs: Collection[str], held_out: Collection[str], tokenizer: Any) -> None:
        """Check that the episodes are of the run's environments, in its tokens, and of no task
        that the run is measured by.

        Args:
            envs: names of the run's environments.
            held_out: ids of the tasks of its evaluations.
            tokenizer: of the policy.

        Raises:
            UserError: one is not.
        """
        if foreign := sorted({episode.env for episode in self._episodes} - set(envs)):
            raise UserError(
                f"{self._setting}: its episodes are of {foreign[0]}, and the run trains on"
                f" {', '.join(sorted(envs))}: {_PLAY}"
            )
        for episode in self._episodes:
            if not _opening_matches_tokens(tokenizer, episode):
                raise UserError(
                    f"{self._setting}: in the policy's tokenizer, the tokens of task"
                    f" {episode.task.id!r} do not say what was asked: take a teacher with the"
                    " policy's tokenizer"
                )
        if leaked := sorted({episode.task.id for episode in self._episodes} & set(held_out)):
            raise UserError(
                f"{self._setting}: {len(leaked)} of its tasks are held out ({leaked[0]!r}), and"
                f" what a run is measured by must not train it: {_PLAY}"
            )

    def warning(self) -> str:
        """Return a warning if episodes come from an evaluation on held-out tasks; else ""."""
        tested = sum(
            episode.key.phase == "eval" and episode.key.run.split("/")[-2:-1] == ["test"]
            for episode in self._episodes
        )
        if not tested:
            return ""
        return (
            f"{self._setting}: {tested} of {len(self._episodes)} episodes are of held-out tasks"
            f" (split test), so evaluations on that split will flatter the model: {_PLAY}"
        )

    def draw(self, played: int, number: int) -> list[Episode]:
        """Draw the recorded share of a round; each episode once, for as long as they last.

        Args:
            played: episodes of the round that the policy played.
            number: of the round.
        """
        if not self._episodes:
            return []
        count = round(played * self._share / (1 - self._share))
        generator = random.Random(derive_seed(self._seed, "given", number))
        repeats, rest = divmod(count, len(self._episodes))
        return [*self._episodes * repeats, *generator.sample(self._episodes, rest)]

    def _read(self, file: Path) -> list[Episode]:
        try:
            return list(iter_episodes(file))
        except UserError as error:
            raise UserError(
                f"{self._setting} must be the episodes.jsonl of an evaluation or a run, or its"
                f" folder ({error}): {_PLAY}"
            ) from error


def _opening_matches_tokens(tokenizer: Any, episode: Episode) -> bool:
    """Whether the tokens that an episode began with contain its first question."""
    question = next((m.content for m in episode.messages if m.role == "user"), "")
    ids = next((list(branch.segments[0].ids) for branch in episode.trajectories), [])
    if max(ids, default=0) >= len(tokenizer):
        return False
    expected = tokenizer.decode(tokenizer.encode(question, add_special_tokens=False))
    return "".join(expected.split()) in "".join(tokenizer.decode(ids).split())
