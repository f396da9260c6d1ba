"""A training run as a user sees it: settings in, live progress on the terminal, a run folder with a
report out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.records.owner import owned
from agentrl.records.plain import as_toml, plain
from agentrl.registry import factory
from agentrl.report.display import EpisodeBar, console, episode_bar
from agentrl.report.page import write_report
from agentrl.report.signs import alarms
from agentrl.trainers.config import TrainConfig, read_config
from agentrl.trainers.observe.trackers import check_trackers
from agentrl.trainers.online import best, checkpoint
from agentrl.trainers.online.loop import train
from agentrl.trainers.online.memory import plan_run, plan_table
from agentrl.trainers.online.run import Listener, Run


def plan_training(
    config: Path, overrides: Sequence[str] = (), *, show: bool = True
) -> dict[str, Any]:
    """Say which models and bytes the run of a TOML file will hold; no weights are loaded and
    nothing is written.

    Returns:
        `MemoryPlan.row()`: "peak_bytes" and what they are made of.

    Raises:
        ConfigError: a setting is wrong.
    """
    settings = read_config(config, overrides)
    limits = [factory(one.id, **one.settings)().limits for one in settings.envs]
    longest = max(limits, key=lambda one: one.episode_tokens)
    found = plan_run(settings, longest)
    if show:
        console.print(plan_table(found))
        if settings.engine.name == "vllm":
            console.print("not counted: vLLM's own weights, keys and values")
    return found.row()


def run_training(
    config: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    log_to: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as a TOML file says.

    Args:
        log_to: trackers beside `metrics.jsonl`, names of `trackers.TRACKERS`.

    Returns:
        {"run", "steps", "trained", "model", "best", "report", "eval"}: folders, rounds of the whole
        run and those that this call trained, the model that was kept as the best with its round and
        pass@1, and all held-out evaluations.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
        TrainingError: training cannot go on; the run folder keeps all that was reached.
    """
    return train_with_display(read_config(config, overrides), folder, resume=resume, log_to=log_to)


def train_with_display(
    config: TrainConfig, folder: Path, *, resume: bool = False, log_to: Sequence[str] = ()
) -> dict[str, Any]:
    """Train with a progress bar, then write the report, which is also written when training stops
    early.
    """
    report = None
    rows: list[dict[str, Any]] = []
    check_trackers(log_to)
    with (
        owned(folder),
        episode_bar("starting") as bar,
        _less_garbage(),
        Run(config, folder, resume=resume, listen=follow(bar, config, rows)) as run,
    ):
        rows += run.folder.history()
        run.folder.track(log_to)
        for name, (old, new) in run.folder.changed.items():
            console.print(
                f"resumed with {name} = {as_toml(new)} (was {as_toml(old)})",
                highlight=False,
                soft_wrap=True,
            )
        try:
            train(run)
        except KeyboardInterrupt:
            console.print(_interrupted(run), style="yellow", highlight=False, soft_wrap=True)
            raise
        finally:
            if run.folder.history():
                report = write_report(folder, tokenizer=run.tokenizer)
    last, kept = checkpoint.latest(folder), best.found(folder)
    steps = max((row["step"] for row in run.folder.history()), default=run.folder.start)
    return {
        "run": str(folder),
        "steps": steps,
        "trained": steps - run.folder.start,
        "model": str(last.model) if last else None,
        "best": kept and {"step": kept.step, "pass_at_1": kept.pass_at_1, "model": str(kept.model)},
        "report": str(report) if report else None,
        "eval": [
            {
                name: value
                for name, value in row.items()
                if name == "step" or name.startswith("eval/")
            }
            for row in run.folder.history()
            if "eval/n_scored" in row
        ],
    }


def _interrupted(run: Run) -> str:
    rows, kept = run.folder.history(), checkpoint.latest(run.folder.path)
    ended = rows[-1]["step"] if rows else 0
    begins = f"after round {kept.step}" if kept else "from the start"
    return f"interrupted after round {ended}; the same command with --resume goes on {begins}"


@contextmanager
def _less_garbage() -> Iterator[None]:
    """Until the end, Python's collector passes over what is there now: walking the objects of
    imported libraries took more than half of its time. Who froze some before keeps what they froze.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def follow(bar: EpisodeBar, config: TrainConfig, rows: list[dict[str, Any]]) -> Listener:
    """A listener that moves the bar with every episode and prints a line for every round.

    Args:
        rows: metrics of the rounds before, by which alarms are judged; those to come are added.
    """
    said: set[str] = set()

    def alarm(row: dict[str, Any]) -> None:
        """Each alarm once, at the round in which it first holds."""
        rows.append(row)
        for name, sentence in alarms(rows).items():
            if name not in said:
                said.add(name)
                console.print(plain(sentence), style="yellow", markup=False, soft_wrap=True)

    def listen(kind: str, what: Any) -> None:
        if kind == "episode":
            bar.episode(what)
        elif kind == "phase":
            bar.restart(*what)
        elif kind == "chat":
            console.print(what, highlight=False, soft_wrap=True)
        elif kind == "warning":
            console.print(
                plain(what), style="yellow", markup=False, highlight=False, soft_wrap=True
            )
        elif kind == "metrics":
            console.print(round_in_words(what, config.steps), highlight=False, soft_wrap=True)
            alarm(what)

    return listen


def round_in_words(row: dict[str, Any], steps: int) -> str:
    """One round in one line."""
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("groups/no_signal", "no signal {:.0%}"),
        ("refill/episodes", "refilled {:.0f}"),
        ("refill/thrown_share", "thrown away {:.0%}"),
        ("value/explained_variance", "explained {:.2f}"),
        ("policy/entropy", "entropy {:.3f}"),
        ("policy/kl", "kl {:.4f}"),
        ("policy/ref_kl", "to the reference {:.3f}"),
        ("policy/teacher_kl", "to the teacher {:.3f}"),
        ("length/sampled_mean", "tokens {:.0f}"),
        ("time/rollout_s", "rollout {:.1f} s"),
        ("time/update_s", "update {:.1f} s"),
        ("eval/pass_at_1", "[bold]held-out pass@1 {:.3f}[/bold]"),
        ("eval/failed_infra", "failed by infrastructure {:.0f}"),
    )
    untold = {name for name in ("eval/failed_infra", "refill/episodes") if not row.get(name)}
    if "refill/episodes" in untold:
        untold.add("refill/thrown_share")  # it is the share without signal
    row = {name: value for name, value in row.items() if name not in untold}
    parts = [text.format(row[name]) for name, text in shown if name in row]
    return f"round {row['step']:>{len(str(steps))}}/{steps}  " + "  ".join(parts)
