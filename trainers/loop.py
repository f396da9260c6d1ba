"""The synchronous driver: play a round, learn from it, hand the weights over, repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.errors import TrainingError
from agentrl.trainers.batch import Rewards
from agentrl.trainers.observe.metrics import RoundClock
from agentrl.trainers.rounds import Round
from agentrl.trainers.run import Run
from agentrl.trajectory import Group


def train(run: Run) -> None:
    """Train from the run's current round to its last.

    Raises:
        TrainingError: the loss is not a number, sampler and trainer disagree, or nothing is left to
            learn from.
        UserError: the environment or a task is wrong for every episode alike.
    """
    config = run.config
    if run.folder.start == 0 and config.eval_every:
        run.record(0, run.evaluate(0))
    for number in run.rounds_left():
        rounds, clock = number + 1, RoundClock()
        played = run.play(number)  # groups of finished episodes, with signal or without
        batch = run.pack(played)  # masks and denominators are fixed from here on
        clock.lap("rollout")
        learned = run.learn(batch, number)
        clock.lap("update")
        probed = run.sync()
        metrics = run.describe(played) | learned | probed
        if is_due(rounds, config.eval_every, config.steps):
            metrics |= run.evaluate(rounds)
        clock.lap("eval")
        run.record(rounds, metrics | clock.metrics(played.played, batch.n_tokens))
        is_quiet = is_hopeless(played, run.learner.recipe.rewards)
        run.quiet = run.quiet + 1 if is_quiet else 0
        if is_due(rounds, config.save_every, run.last):
            run.save(rounds)
        stop_if_hopeless(run, played, rounds)


def stop_if_hopeless(run: Run, played: Round, rounds: int) -> None:
    """End a run that has had no signal for too long, or that finished without a single score.

    Raises:
        TrainingError: it is such a run.
    """
    if run.quiet >= run.config.quiet_rounds:
        raise TrainingError(
            f"quiet_rounds={run.quiet} rounds in a row gave no signal: {explain(played.played)}"
        )
    if rounds == run.last and not is_any_scored(played.played):
        rows = [row for row in run.folder.history() if row["step"] > run.folder.start]
        if not any("reward/mean" in row for row in rows):
            why = explain(played.played)
            raise TrainingError(f"no episode was scored in {len(rows)} rounds: {why}")


def is_due(rounds: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` rounds (0 = never) happens after this one."""
    return bool(every) and (rounds % every == 0 or rounds == last)


def is_hopeless(played: Round, rewards: Rewards) -> bool:
    """Whether a round taught nothing and solved nothing, later draws included. Where everything is
    solved, continuing does no harm.
    """
    is_solved = any(episode.passed for group in played.played for episode in group.episodes)
    return not is_solved and not rewards.any_signal(played.trained)


def is_any_scored(groups: Sequence[Group]) -> bool:
    """Whether any episode was scored."""
    return any(reward is not None for group in groups for reward in group.rewards_G)


def explain(groups: Sequence[Group]) -> str:
    """Say why groups without any success teach nothing."""
    if not is_any_scored(groups):
        reasons = Counter(e.failure or e.score.why for group in groups for e in group.episodes)
        most, count = reasons.most_common(1)[0] if reasons else ("none was played", 0)
        return f"infrastructure failed every episode: {most[:300]} ({count} of {reasons.total()})"
    return (
        "nothing was solved in them: choose easier tasks or warm-start the model, or give it more"
        " chances (group_size, quiet_rounds) and --resume"
    )
