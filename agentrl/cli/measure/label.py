"""`agentrl label`: how likely an episode passes from the end of each of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import (
    Json,
    Parser,
    Sandbox,
    Set,
    Trust,
    chat_settings,
    print_json,
    read_settings,
    trusted,
)
from agentrl.records.plain import plain

Run = Annotated[
    Path, typer.Argument(help="Folder of an evaluation or a training run, or its episodes.jsonl.")
]
Policy = Annotated[
    str, typer.Option(help="Goes on from each turn: hf:MODEL or vllm:MODEL, of the same tokenizer.")
]
Completions = Annotated[int, typer.Option(min=1, help="Episodes from each turn.")]
Limit = Annotated[int, typer.Option(help="At most so many episodes, the first; 0: all.")]
Temperature = Annotated[float, typer.Option(help="Of the completions.")]
Env = Annotated[str, typer.Option(help="Environment, where the run does not name it.")]
Out = Annotated[Path, typer.Option(help="Folder of the labels; interrupted ones go on there.")]


def label_run(  # noqa: PLR0913 - one parameter per option
    run: Run,
    policy: Policy,
    completions: Completions = 8,
    limit: Limit = 0,
    temperature: Temperature = 1.0,
    env: Env = "",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    set_: Set = None,
    out: Out = Path("runs/labels"),
    as_json: Json = False,
) -> None:
    """Play on from the end of every turn of a run's episodes, and record how often that passes."""
    from agentrl.evaluation.results.turn_labels import LabelPlan, label_turns
    from agentrl.report.display import count_bar

    plan = LabelPlan(
        run=run,
        policy=policy,
        out=out,
        completions=completions,
        limit=limit,
        temperature=temperature,
        env=env,
        settings=read_settings(set_),
        sandbox=trusted(sandbox, trust),
        chat=chat_settings(parser, "branch", "auto", None, ""),
    )
    with count_bar(f"label {run}") as progress:
        found = label_turns(plan, progress)
    if as_json:
        print_json(found)
        return
    mean = "unknown" if found["mean"] is None else f"{found['mean']:.3f}"
    print(
        f"labelled {found['n_turns']} turns of {found['n_episodes']} episodes: mean label {mean},"
        f" by {found['n_completions']} completions; wrote {found['labels']}"
    )
    if found["n_failed_infra"]:
        print(
            f"infrastructure failed {found['n_failed_infra']} further completions, which count"
            f" nowhere; {found['n_unknown']} turns have no label for that"
        )
    for why, count in found["skipped"].items():
        print(plain(f"left out {count} of the run's episodes: {why}"))
