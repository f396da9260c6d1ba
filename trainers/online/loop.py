"""The synchronous driver: play a round, learn from it, hand the weights over, again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.errors import TrainingError
from agentrl.trainers.observe.clock import Clock
from agentrl.trainers.observe.metrics import rollout_metrics
from agentrl.trainers.online.rounds import Round
from agentrl.trainers.online.run import Run
from agentrl.trainers.rewards import Rewards
from agentrl.trajectory import Group


def train(run: Run) -> None:
    """Train from the run's current round to its last.

    Raises:
        TrainingError: the loss is not a number, sampler and trainer disagree, or nothing is left to
            learn from.
        UserError: the environment or a task is wrong for every episode alike.
    """
    config, start, rewards = run.config, run.folder.start, run.learner.recipe.rewards
    if start == 0 and config.eval_every:
        run.log(0, run.evaluate(0))
    for step in run.rounds_left():
        clock = Clock()
        played = run.play(step)
        batch = run.pack(played)
        run.watch.confirm_restarted(step)
        clock.lap("rollout")
        run.engine.pause()  # nothing is under way: one that sleeps may, and give its memory back
        learnt = run.learner.step(batch, step)
        clock.lap("update")
        run.rollouts.sync(run.learner.weights(), step + 1)
        run.engine.resume()
        metrics = {
            **rollout_metrics(played.groups, rewards),
            **run.chosen(played),
            **run.watch.noticed(played.groups, step),
            **(played.draws.metrics(rewards) if run.learner.recipe.filters else {}),
            **learnt,
            **run.watch.confirm(step + 1),
        }
        if is_due(step + 1, config.eval_every, config.steps):
            metrics |= run.evaluate(step + 1)
        clock.lap("eval")
        run.log(step + 1, metrics | clock.metrics(played.played, batch.n_tokens))
        run.quiet = run.quiet + 1 if is_hopeless(played, rewards) else 0
        if is_due(step + 1, config.save_every, run.last):
            run.save(step + 1)
        stop_where_nothing_comes(run, played, step + 1)


def stop_where_nothing_comes(run: Run, played: Round, rounds: int) -> None:
    """End a run without signal for long, and one that is over and had no score in any of the rounds
    that were played now.

    Raises:
        TrainingError: it is such a run; the message says why.
    """
    if run.quiet >= run.config.quiet_rounds:
        raise TrainingError(
            f"quiet_rounds={run.quiet} rounds in a row gave no signal: {why(played.played)}"
        )
    if rounds == run.last and not any_scored(played.played):
        now = [row for row in run.folder.history() if row["step"] > run.folder.start]
        if not any("reward/mean" in row for row in now):
            raise TrainingError(f"no episode was scored in {len(now)} rounds: {why(played.played)}")


def any_scored(groups: Sequence[Group]) -> bool:
    """Whether an episode was scored."""
    return any(reward is not None for group in groups for reward in group.rewards_G)


def is_due(rounds: int, every: int, last: int) -> bool:
    """Whether something that happens every so many rounds (0: never) happens after this one."""
    return bool(every) and (rounds % every == 0 or rounds == last)


def is_hopeless(played: Round, rewards: Rewards) -> bool:
    """Whether a round taught nothing and solved nothing, later draws included; where everything is
    solved, going on does no harm.
    """
    solved = any(episode.passed for group in played.played for episode in group.episodes)
    return not solved and not rewards.any_signal(played.trained)


def why(groups: Sequence[Group]) -> str:
    """In words, why groups without any success teach nothing."""
    if not any_scored(groups):
        reasons = Counter(e.failure or e.score.why for group in groups for e in group.episodes)
        most, count = reasons.most_common(1)[0] if reasons else ("none was played", 0)
        return f"infrastructure failed every episode: {most[:300]} ({count} of {reasons.total()})"
    return (
        "nothing was solved in them: choose easier tasks or warm-start the model, or give it more"
        " chances (group_size, quiet_rounds) and --resume"
    )
