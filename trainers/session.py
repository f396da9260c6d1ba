"""A training run as a user sees it: settings in; progress on the terminal; a run folder with a
report out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.chat.settings import in_words
from agentrl.records.owner import owned
from agentrl.records.plain import as_toml
from agentrl.registry import factory
from agentrl.report.display import TrainingDisplay, console, episode_bar
from agentrl.report.page import write_report
from agentrl.trainers.config import TrainConfig, read_config
from agentrl.trainers.folder import best_model, latest_checkpoint
from agentrl.trainers.loop import train
from agentrl.trainers.memory import plan_run, plan_table
from agentrl.trainers.observe.trackers import check_trackers
from agentrl.trainers.run import Run


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
    limits = [factory(one.id, one.limits, **one.settings)().limits for one in settings.envs]
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
        log_to: further trackers, names of `trackers.TRACKERS`.

    Returns:
        {"run", "steps", "trained", "model", "best", "report", "eval"}: folders, rounds of the whole
        run and those that this call trained, the model that was kept as the best with its round and
        pass@1, and all held-out evaluations.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
        TrainingError: training cannot continue; the run folder keeps what was reached.
    """
    return train_with_display(read_config(config, overrides), folder, resume=resume, log_to=log_to)


def train_with_display(
    config: TrainConfig, folder: Path, *, resume: bool = False, log_to: Sequence[str] = ()
) -> dict[str, Any]:
    """Train with a progress bar, then write the report, which is also written when training stops
    early.
    """
    report = None
    check_trackers(log_to)
    with (
        owned(folder),
        episode_bar("starting") as bar,
        _less_garbage_collection(),
    ):
        display = TrainingDisplay(bar, config.steps)
        with Run(config, folder, resume=resume, events=display) as run:
            display.say(in_words(run.chat))
            display.rows += run.folder.history()
            run.folder.track(log_to)
            for name, (old, new) in run.folder.changed.items():
                display.say(f"resumed with {name} = {as_toml(new)} (was {as_toml(old)})")
            try:
                train(run)
            except KeyboardInterrupt:
                display.on_warning(_interrupted(run))
                raise
            finally:
                if run.folder.history():
                    report = write_report(folder, tokenizer=run.tokenizer)
    last, kept = latest_checkpoint(folder), best_model(folder)
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
    rows, last = run.folder.history(), latest_checkpoint(run.folder.path)
    ended = rows[-1]["step"] if rows else 0
    begins = f"after round {last.step}" if last else "from the start"
    return f"interrupted after round {ended}; the same command with --resume continues {begins}"


@contextmanager
def _less_garbage_collection() -> Iterator[None]:
    """Let Python's collector skip the objects that exist now, until the end of the block."""
    # Walking the objects of imported libraries took more than half of the collector's time.
    if gc.get_freeze_count():  # somebody else froze some, and they stay frozen
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
