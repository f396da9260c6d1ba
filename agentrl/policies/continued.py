"""Plays the beginning of a recorded episode again, token for token, and lets a policy go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentrl.errors import ReplayDiverged, UserError
from agentrl.policies.base import TokenPlayer, TokenPolicy
from agentrl.trajectory import Episode, Trajectory
from agentrl.types import EndReason, Limits, Message, Task, ToolSpec


class Continued:
    """A policy whose first turns are those of a recorded episode.

    The tools of these turns run again, in the sandbox of the new episode; the tokens are the
    recorded ones. From there on the policy samples.

    Args:
        policy: goes on.
        episode: was sampled under the same chat template.
        turns: how many turns of it are played again.

    Attributes:
        diverged: whether an episode met another answer than the recording, as every further one of
            as many turns will.
    """

    def __init__(self, policy: TokenPolicy, episode: Episode, turns: int) -> None:
        self.name = f"{policy.name} after {turns} recorded turns"
        self.diverged = False
        self._policy, self._episode, self._turns = policy, episode, turns

    @contextmanager
    def player(self, task: Task, limits: Limits, seed: int) -> Iterator[ContinuedPlayer]:
        """A player with a seat at the engine for as long as the block lasts."""
        with self._policy.player(task, limits, seed) as player:
            try:
                yield ContinuedPlayer(self._policy, player, self._episode, self._turns)
            except ReplayDiverged:
                self.diverged = True
                raise


class ContinuedPlayer:
    """One policy in one episode that goes on from a recorded one."""

    def __init__(
        self, policy: TokenPolicy, player: TokenPlayer, episode: Episode, turns: int
    ) -> None:
        self._policy, self._player, self._episode, self._left = policy, player, episode, turns
        self._branches = beginning(episode.trajectories, turns)
        self._turns = turns

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The recorded branches, and what was sampled after them."""
        played = self._turns - self._left
        return self._player.trajectories or beginning(self._episode.trajectories, played)

    @property
    def thinking_s(self) -> float | None:
        """As of the policy that goes on: an engine that starts anew costs no episode its time."""
        return self._player.thinking_s

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        """The recorded turn, or a new one.

        Raises:
            ReplayDiverged: the environment answered otherwise than in the recording.
            UserError: the policy's chat template or tokenizer is not that of the recording.
            EngineError: sampling failed.
        """
        if self._player.trajectories:
            return await self._player.act(history, tools)
        recorded, played = self._episode.messages, self._turns - self._left
        if tuple(history) != recorded[: len(history)]:
            raise ReplayDiverged(
                f"episode {'/'.join(map(str, self._episode.key))}: after {played} of its turns"
                " the environment said something else than in the recording"
            )
        if not played:
            self._refuse_other_tokens(history, tools)
        if not self._left:
            if played:
                last = max(i for i, one in enumerate(history) if one.role == "assistant")
                self._player.take(self._branches, last)
            return await self._player.act(history, tools)
        self._left -= 1
        return recorded[len(history)], None

    def _refuse_other_tokens(self, opening: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        ids = tuple(self._policy.chat.prompt_ids(opening, tools))
        if ids != self._episode.trajectories[0].segments[0].ids:
            raise UserError(
                f"the tokens of episode {'/'.join(map(str, self._episode.key))} are not those that"
                f" policy {self._policy.name} would read: go on with the model that played it, or"
                " with one of the same tokenizer and chat template"
            )


def beginning(branches: Sequence[Trajectory], turns: int) -> tuple[Trajectory, ...]:
    """Branches up to the last token of a turn; none for no turns.

    Raises:
        ValueError: they have fewer turns.
    """
    found: list[Trajectory] = []
    left = turns
    for branch in branches:
        if not left:
            break
        for at, segment in enumerate(branch.segments):
            left -= at >= branch.shared and segment.finish is not None
            if not left:
                found.append(Trajectory(branch.segments[: at + 1], min(branch.shared, at + 1)))
                break
        else:
            found.append(branch)
    if left:
        raise ValueError(f"{left} of {turns} turns are not in the branches")
    return tuple(found)
