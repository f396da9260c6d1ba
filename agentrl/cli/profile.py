"""`agentrl profile`: how much a policy could learn from an environment, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import (
    EngineOption,
    Env,
    Json,
    LimitOption,
    Parser,
    Sandbox,
    Set,
    Split,
    Temperature,
    Trust,
    chat_settings,
    print_json,
    read_limits,
    spelt_as_options,
    trusted,
    vllm_settings,
)
from agentrl.errors import ConfigError
from agentrl.records.plain import plain
from agentrl.settings import read_pairs

Policy = Annotated[
    str, typer.Option(help="oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL.")
]
Tasks = Annotated[int, typer.Option(min=1, help="Number of tasks, the first of the split.")]
Samples = Annotated[int, typer.Option(min=2, help="Episodes per task.")]
Seed = Annotated[int, typer.Option(help="Seed of the planned run; its first tasks are played.")]
RoundTasks = Annotated[int, typer.Option(min=1, help="Tasks per round of the planned run.")]
GroupSize = Annotated[
    int, typer.Option(min=2, help="Episodes per task (G) in a round of the planned run.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the records; an interrupted profile resumes there.")
]
Page = Annotated[
    Path | None,
    typer.Option(help="HTML page to write; default profile.html in --out, or in this folder."),
]
Save = Annotated[
    Path | None, typer.Option(help="File to write the counts to, for a run's curriculum.start.")
]


def profile(
    env: Env,
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
    limits: LimitOption = None,
    out: Out = None,
    page: Page = None,
    save: Save = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure the pass rate of every task, and what each sampler would spend on it."""
    from agentrl.curriculum.profile import Profile
    from agentrl.evaluation.run import EvalPlan
    from agentrl.registry import factory
    from agentrl.rollout.play import derive_seed

    _check_folders(page, save)
    plan = EvalPlan(
        make=factory(env, read_limits(limits), **read_pairs(set_)),
        policy=policy,
        split=split,
        limit=tasks,
        samples=samples,
        sandbox=trusted(sandbox, trust),
        seed=derive_seed(seed, split, 0) if split == "train" else derive_seed(seed, split),
        temperature=temperature,
        chat=chat_settings(parser),
        engine=vllm_settings(engine_option),
        out=out,
    )
    with spelt_as_options():
        counts, summary = _play(plan, f"{env} · {policy}")
    result = {"env": env, "policy": policy, "split": split, "seed": seed}
    result |= Profile.of(counts).row(group_size, tasks_per_step)
    result |= {name: summary[name] for name in ("n_episodes", "n_failed_infra", "n_refused")}
    _show(result, page or (out or Path()) / "profile.html", save, as_json)


def _check_folders(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ConfigError(
                f"{file.parent} is not a folder: create it, or write {file.name} elsewhere"
            )


def _show(result: dict[str, Any], page: Path, save: Path | None, as_json: bool) -> None:
    from agentrl.curriculum.profile import profile_lines
    from agentrl.records.files import write_bytes_atomic, write_json_atomic
    from agentrl.report.profile_page import profile_page

    if save is not None:
        write_json_atomic(save, result)
    write_bytes_atomic(page, profile_page(result).encode(errors="backslashreplace"))
    if as_json:
        print_json(result | {"page": str(page)})
    else:
        kept = f"; counts in {save}" if save else ""
        print("\n".join(map(plain, [*profile_lines(result), f"page in {page}{kept}"])))


def _play(plan: Any, label: str) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """(passed, scored) of every task, and the summary of the evaluation."""
    import tempfile
    from dataclasses import replace

    from agentrl.evaluation.run import EvalProgress, evaluate
    from agentrl.evaluation.summary import task_counts
    from agentrl.records.files import read_episodes
    from agentrl.report.display import console, episode_bar

    with tempfile.TemporaryDirectory() as scratch, episode_bar(label) as bar:
        folder = plan.out or Path(scratch) / "records"
        progress = EvalProgress(
            lambda total: bar.restart(label, total),
            bar.episode,
            lambda sentence: console.print(sentence, highlight=False, soft_wrap=True),
        )
        summary = evaluate(replace(plan, out=folder), progress)
        counts = task_counts(read_episodes(folder / "episodes.jsonl").values())
    return {name: (solved, scored) for name, (scored, solved) in counts.items()}, summary
