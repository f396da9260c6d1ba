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


def profile(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    policy: Annotated[
        str, typer.Option(help="oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL.")
    ],
    tasks: Annotated[int, typer.Option(min=1, help="Tasks, the first of the split.")] = 128,
    samples: Annotated[int, typer.Option(min=2, help="Episodes per task.")] = 8,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "train",
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Tasks of a round.")] = 32,
    group_size: Annotated[int, typer.Option(min=2, help="G, episodes per task of a round.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the run that is planned: its first tasks.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of sampled policies.")] = 1.0,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    engine_option: EngineOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of records; an interrupted profile goes on there.")
    ] = None,
    page: Annotated[Path, typer.Option(help="The picture: one self-contained page.")] = Path(
        "profile.html"
    ),
    save: Annotated[
        Path | None, typer.Option(help="File that a run's curriculum starts from.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure every task's pass rate, and say what a run with each sampler would spend on it."""
    from agentrl.curriculum.profile import Profile, profile_lines
    from agentrl.evaluation.run import EvalPlan
    from agentrl.records.files import write_bytes_atomic, write_json_atomic
    from agentrl.registry import factory
    from agentrl.report.profile_page import profile_page
    from agentrl.rollout.play import derive_seed

    for file in (page, save):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(
                f"{file.parent} is no folder: make it, or write {file.name} elsewhere"
            )
    plan = EvalPlan(
        make=factory(env, **read_settings(set_)),
        policy=policy,
        split=split,
        limit=tasks,
        samples=samples,
        ks=(1,),
        sandbox=trusted(sandbox, trust),
        seed=derive_seed(seed, split, 0) if split == "train" else derive_seed(seed, split),
        temperature=temperature,
        chat=chat_settings(parser, "branch", "auto", None, ""),
        engine=vllm_settings(engine_option),
        out=out,
    )
    counts, summary = _play(plan, f"{env} · {policy}")
    found = {
        "env": env,
        "policy": policy,
        "split": split,
        "seed": seed,
        **Profile.of(counts).row(group_size, tasks_per_step),
        "n_episodes": summary["n_episodes"],
        "n_failed_infra": summary["n_failed_infra"],
        "n_refused": summary["n_refused"],
    }
    if save is not None:
        write_json_atomic(save, found)
    write_bytes_atomic(page, profile_page(found).encode(errors="backslashreplace"))
    found["page"] = str(page)
    if as_json:
        print_json(found)
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
