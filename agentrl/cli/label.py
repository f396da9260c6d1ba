"""`agentrl label`: how likely an episode passes from the end of each of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import (
    Json,
    Parser,
    RunEnv,
    Sandbox,
    Set,
    Temperature,
    Trust,
    chat_settings,
    print_json,
    spelt_as_options,
    trusted,
)
from agentrl.records.plain import plain
from agentrl.settings import read_pairs

LabelledRun = Annotated[
    Path, typer.Argument(help="Folder of an evaluation or a training run, or its episodes.jsonl.")
]
Policy = Annotated[
    str,
    typer.Option(
        help="Policy that continues from each turn: hf:MODEL or vllm:MODEL, with the same"
        " tokenizer."
    ),
]
Completions = Annotated[int, typer.Option(min=1, help="Episodes to play from each turn.")]
Limit = Annotated[int, typer.Option(help="Maximum number of episodes, from the first (0 = all).")]
Out = Annotated[
    Path, typer.Option(help="Folder for the labels; interrupted labelling resumes from it.")
]


def label_run(
    run: LabelledRun,
    policy: Policy,
    completions: Completions = 8,
    limit: Limit = 0,
    temperature: Temperature = 1.0,
    env: RunEnv = "",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    set_: Set = None,
    out: Out = Path("runs/labels"),
    as_json: Json = False,
) -> None:
    """Roll out from the end of each turn of a run's episodes and record the success rate."""
    from agentrl.evaluation.label import LabelPlan, label_turns
    from agentrl.report.display import count_bar

    plan = LabelPlan(
        run=run,
        policy=policy,
        out=out,
        completions=completions,
        limit=limit,
        temperature=temperature,
        env=env,
        settings=read_pairs(set_),
        sandbox=trusted(sandbox, trust),
        chat=chat_settings(parser),
    )
    with spelt_as_options(), count_bar(f"label {run}") as progress:
        result = label_turns(plan, progress)
    if as_json:
        print_json(result)
        return
    mean = "unknown" if result["mean"] is None else f"{result['mean']:.3f}"
    print(
        f"labelled {result['n_turns']} turns of {result['n_episodes']} episodes: mean label {mean},"
        f" by {result['n_completions']} completions; wrote {result['labels']}"
    )
    if result["n_failed_infra"]:
        print(
            f"infrastructure failed {result['n_failed_infra']} further completions, which count"
            f" nowhere; {result['n_unknown']} turns have no label because of that"
        )
    for reason, count in result["skipped"].items():
        print(plain(f"skipped {count} episodes of the run: {reason}"))
