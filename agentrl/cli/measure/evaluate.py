"""`agentrl eval`: measure a policy on an environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import (
    ChatTemplate,
    EngineOption,
    Json,
    OnRewrite,
    Parser,
    PolicyOption,
    Sandbox,
    Set,
    TemplateOption,
    ToolRole,
    Trust,
    chat_settings,
    engine_of,
    print_json,
    read_settings,
    served_options,
    trusted,
)
from agentrl.errors import ConfigError
from agentrl.records.plain import plain

if TYPE_CHECKING:
    from agentrl.env import ToolEnv
    from agentrl.evaluation.run import EvalPlan

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

Policy = Annotated[
    str,
    typer.Option(
        help="oracle, noop, hf:MODEL or vllm:MODEL (a folder or ORG/NAME), or openai:MODEL@URL."
    ),
]
Tasks = Annotated[Path | None, typer.Option(help="Task file, for environments that take one.")]
Limit = Annotated[int, typer.Option(help="At most so many tasks; 0: all, where the split ends.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest, up to this mass.")]
TopK = Annotated[int, typer.Option(help="Sample among so many likeliest; 0: all.")]
Price = Annotated[
    str,
    typer.Option(help="US dollars per million prompt,completion tokens, or a TOML file of them."),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Episodes at the same time; 0: as many as fit, at most 64, or 4 under a bound."
    ),
]
MaxCost = Annotated[
    float | None, typer.Option(help="US dollars from which on no episode begins; needs --price.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens, prompts included, from which on no episode begins.")
]
User = Annotated[
    str,
    typer.Option(help="Policy that speaks for the user in dialogues, as in openai:MODEL@URL."),
]
Trained = Annotated[
    Path | None, typer.Option(help="Task file that was trained on, to look for its tasks here.")
]
PolicyFile = Annotated[
    str, typer.Option(help="Safety policy around tool calls: a shipped name or a file.")
]
AllowLost = Annotated[
    int, typer.Option(min=0, help="Episodes that infrastructure may fail; more exit with 1.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder of records; an interrupted run goes on there.")
]


def evaluate(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    policy: Policy = "oracle",
    tasks: Tasks = None,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "test",
    limit: Limit = 0,
    samples: Annotated[int, typer.Option(help="Episodes per task.")] = 1,
    k: Annotated[str, typer.Option(help="Comma-separated values of k for pass@k.")] = "1",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    seed: Annotated[int, typer.Option(help="Every other seed is derived from it.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of sampled policies.")] = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    parser: Parser = "auto",
    on_rewrite: OnRewrite = "branch",
    tool_role: ToolRole = "auto",
    template_option: TemplateOption = None,
    template: ChatTemplate = "",
    engine_option: EngineOption = None,
    policy_option: PolicyOption = None,
    price: Price = "",
    max_cost: MaxCost = None,
    max_tokens: MaxTokens = None,
    concurrency: Concurrency = 0,
    user: User = "",
    trained: Trained = None,
    out: Out = None,
    policy_file: PolicyFile = "",
    allow_lost: AllowLost = 0,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: unbiased pass@k with its interval, endings, cost and lost episodes."""
    from agentrl.evaluation.budget import read_prices
    from agentrl.evaluation.run import EvalPlan

    decoding: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    played: dict[str, Any] = {"split": split, "limit": limit, "samples": samples, "seed": seed}
    plan = EvalPlan(
        make=_factory(env, read_settings(set_) | ({"tasks_file": str(tasks)} if tasks else {})),
        policy=policy,
        ks=read_ks(k),
        sandbox=trusted(sandbox, trust),
        **played,
        **decoding,
        chat=chat_settings(parser, on_rewrite, tool_role, template_option, template),
        engine=engine_of(policy, engine_option),
        served=served_options(policy, policy_option),
        prices=read_prices(price, policy),
        max_usd=max_cost,
        max_tokens=max_tokens,
        concurrency=concurrency,
        user=user,
        trained=trained,
        out=out,
        policy_file=policy_file,
    )
    _tell(with_a_bar(plan, f"{env} · {policy}"), as_json, allow_lost)


def _factory(env: str, settings: dict[str, Any]) -> Callable[[], ToolEnv]:
    from agentrl.registry import factory

    return factory(env, **settings)


def _tell(result: Mapping[str, Any], as_json: bool, allow_lost: int) -> None:
    from agentrl.evaluation.summary import summary_lines

    if as_json:
        print_json(result)
    else:
        print("\n".join(map(plain, summary_lines(result))))
    raise typer.Exit(exit_code(result, allow_lost))


def exit_code(result: Mapping[str, Any], allow_lost: int) -> int:
    """0 for a whole evaluation, 130 for an interrupted one, else 1 with a sentence."""
    lost, played = result["n_failed_infra"], result["n_episodes"]
    if result["n_missing"]:
        why = result["stopped"].replace("_", "-") or "cut short"
        print(
            f"agentrl: {why}: {result['n_missing']} samples were not played; the same command"
            " with the same --out goes on with them",
            file=sys.stderr,
        )
        return INTERRUPTED if result["stopped"] == "interrupted" else 1
    if lost <= allow_lost:
        return 1 if lost == played > 0 else 0
    print(
        f"agentrl: infrastructure failed {lost} of {played} episodes, which are in no figure: play"
        f" them again with the same --out, or accept them with --allow-lost {lost}",
        file=sys.stderr,
    )
    return 1


def read_ks(text: str) -> tuple[int, ...]:
    """Whole numbers of `1,4,8`.

    Raises:
        ConfigError: one is no whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--k {text!r}: give whole numbers separated by commas, as in 1,4,8"
        ) from None


def with_a_bar(plan: EvalPlan, label: str) -> dict[str, Any]:
    """Run an evaluation with a bar on the terminal."""
    from agentrl.evaluation.run import EvalProgress
    from agentrl.evaluation.run import evaluate as run
    from agentrl.report.display import console, episode_bar

    with episode_bar(label) as bar:
        progress = EvalProgress(
            lambda total: bar.restart(label, total),
            bar.episode,
            lambda said: console.print(said, highlight=False, soft_wrap=True),
        )
        return run(plan, progress)
