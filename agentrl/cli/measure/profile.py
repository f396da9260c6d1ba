"""`agentrl profile`: what an environment would teach a policy, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import (
    EngineOption,
    Json,
    Parser,
    Sandbox,
    Set,
    Trust,
    chat_settings,
    print_json,
    read_settings,
    trusted,
    vllm_settings,
)
from agentrl.errors import ConfigError
from agentrl.records.plain import plain

Policy = Annotated[
    str, typer.Option(help="oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL.")
]
Tasks = Annotated[int, typer.Option(min=1, help="Tasks, the first of the split.")]
Samples = Annotated[int, typer.Option(min=2, help="Episodes per task.")]
Split = Annotated[str, typer.Option(help="Split of the environment.")]
Seed = Annotated[int, typer.Option(help="Of the run that is planned: its first tasks are played.")]
RoundTasks = Annotated[int, typer.Option(min=1, help="Tasks of a round of that run.")]
GroupSize = Annotated[int, typer.Option(min=2, help="G, episodes per task of such a round.")]
Temperature = Annotated[float, typer.Option(help="Of sampled policies.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of records; an interrupted profile goes on there.")
]
Page = Annotated[Path, typer.Option(help="The picture: one self-contained page.")]
Save = Annotated[Path | None, typer.Option(help="File that a run's curriculum starts from.")]


def profile(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    policy: Policy,
    tasks: Tasks = 128,
    samples: Samples = 8,
    split: Split = "train",
    tasks_per_step: RoundTasks = 32,
    group_size: GroupSize = 8,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    engine_option: EngineOption = None,
    out: Out = None,
    page: Page = Path("profile.html"),
    save: Save = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure every task's pass rate, and say what a run with each sampler would spend on it."""
    from agentrl.curriculum.profile import Profile
    from agentrl.evaluation.run import EvalPlan
    from agentrl.registry import factory
    from agentrl.rollout.play import derive_seed

    _refuse_places(page, save)
    plan = EvalPlan(
        make=factory(env, **read_settings(set_)),
        policy=policy,
        split=split,
        limit=tasks,
        samples=samples,
        sandbox=trusted(sandbox, trust),
        seed=derive_seed(seed, split, 0) if split == "train" else derive_seed(seed, split),
        temperature=temperature,
        chat=chat_settings(parser, "branch", "auto", None, ""),
        engine=vllm_settings(engine_option),
        out=out,
    )
    counts, summary = _play(plan, f"{env} · {policy}")
    found = {"env": env, "policy": policy, "split": split, "seed": seed}
    found |= Profile.of(counts).row(group_size, tasks_per_step)
    found |= {name: summary[name] for name in ("n_episodes", "n_failed_infra", "n_refused")}
    _show(found, page, save, as_json)


def _refuse_places(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ConfigError(
                f"{file.parent} is no folder: make it, or write {file.name} elsewhere"
            )


def _show(found: dict[str, Any], page: Path, save: Path | None, as_json: bool) -> None:
    from agentrl.curriculum.profile import profile_lines
    from agentrl.records.files import write_bytes_atomic, write_json_atomic
    from agentrl.report.profile_page import profile_page

    if save is not None:
        write_json_atomic(save, found)
    write_bytes_atomic(page, profile_page(found).encode(errors="backslashreplace"))
    if as_json:
        print_json(found | {"page": str(page)})
    else:
        kept = f"; counts in {save}" if save else ""
        print("\n".join(map(plain, [*profile_lines(found), f"picture in {page}{kept}"])))


def _play(plan: Any, label: str) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """(passed, scored) of every task, and the summary of the evaluation."""
    import tempfile
    from dataclasses import replace

    from agentrl.evaluation.passk import task_counts
    from agentrl.evaluation.run import EvalProgress, evaluate
    from agentrl.records.files import read_episodes
    from agentrl.report.display import console, episode_bar

    with tempfile.TemporaryDirectory() as scratch, episode_bar(label) as bar:
        folder = plan.out or Path(scratch) / "records"
        progress = EvalProgress(
            lambda total: bar.restart(label, total),
            bar.episode,
            lambda said: console.print(said, highlight=False, soft_wrap=True),
        )
        summary = evaluate(replace(plan, out=folder), progress)
        counts = task_counts(read_episodes(folder / "episodes.jsonl").values())
    return {name: (solved, scored) for name, (scored, solved) in counts.items()}, summary
