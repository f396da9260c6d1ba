"""`agentrl eval`: measure a policy on an environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import (
    ChatTemplate,
    EngineOption,
    Json,
    LimitOption,
    OnRewrite,
    Parser,
    PolicyOption,
    Sandbox,
    Set,
    Split,
    Temperature,
    TemplateOption,
    ToolRole,
    Trust,
    chat_row,
    option_of,
    print_json,
    refuse_unused,
    spelt_as_options,
    trusted,
    vllm_row,
)
from agentrl.errors import ConfigError
from agentrl.records.plain import plain
from agentrl.settings import check, nearest, read_pairs, read_toml, set_value

if TYPE_CHECKING:
    from agentrl.evaluation.run import EvalPlan
    from agentrl.evaluation.settings import EvalSettings

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

Target = Annotated[
    str,
    typer.Argument(
        metavar="ENV|CONFIG.toml",
        help="Environment id, path/to/file.py:Class, or the TOML file of a training run, whose"
        " held-out tasks are played.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="oracle, noop, hf:MODEL or vllm:MODEL (a folder or ORG/NAME), or openai:MODEL@URL."
    ),
]
Tasks = Annotated[Path | None, typer.Option(help="Task file, for environments that take one.")]
Limit = Annotated[
    int, typer.Option(help="Maximum number of tasks (0 = all; only for finite splits).")
]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the most likely tokens with this total probability (1 = off)."),
]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens (0 = off).")]
Price = Annotated[
    str,
    typer.Option(
        help="US dollars per million prompt and completion tokens, as in 0.15,0.60, or a TOML file"
        " of prices."
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Episodes played at the same time (0 = up to 64, or 4 if spending is bounded)."
    ),
]
MaxCost = Annotated[
    float | None,
    typer.Option(
        help="Stop starting episodes once this many US dollars are spent (requires --price)."
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Stop starting episodes once this many tokens are used, prompts included."),
]
User = Annotated[
    str, typer.Option(help="Policy that plays the user in dialogues, as in openai:MODEL@URL.")
]
Trained = Annotated[
    Path | None,
    typer.Option(help="Task file that was used for training, to search the tasks for its own."),
]
PolicyFile = Annotated[
    str, typer.Option(help="Safety policy for tool calls: a shipped name or a file.")
]
AllowLost = Annotated[
    int,
    typer.Option(min=0, help="Exit with 0 although infrastructure failed this many episodes."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the records; an interrupted evaluation resumes from it."),
]


def evaluate(
    context: typer.Context,
    env: Target,
    policy: Policy = "oracle",
    tasks: Tasks = None,
    split: Split = "test",
    limit: Limit = 0,
    samples: Annotated[int, typer.Option(help="Episodes per task.")] = 1,
    k: Annotated[str, typer.Option(help="Comma-separated values of k for pass@k.")] = "1",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    parser: Parser = "auto",
    on_rewrite: OnRewrite = "branch",
    tool_role: ToolRole = "auto",
    template_option: TemplateOption = None,
    template: ChatTemplate = "",
    engine_option: EngineOption = None,
    policy_option: PolicyOption = None,
    limits: LimitOption = None,
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
    """Measure a policy: pass@k with confidence intervals, endings, cost and side effects.

    With a CONFIG.toml of `agentrl train`, the model of the file plays its held-out tasks; options
    on the command line replace its settings, and --set changes any of them.
    """
    from_file = env.endswith(".toml")
    row: dict[str, Any] = {
        "policy": policy,
        "tasks": str(tasks or ""),
        "split": split,
        "limit": limit,
        "samples": samples,
        "k": read_ks(k),
        "sandbox": trusted(sandbox, trust),
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "chat": chat_row(parser, on_rewrite, tool_role, template_option, template),
        "engine": vllm_row(engine_option),
        "served": read_pairs(policy_option, "--policy-option"),
        "limits": read_pairs(limits, "--limits"),
        "price": price,
        "max_cost": max_cost,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "user": user,
        "trained": str(trained or ""),
        "safety": {"policy": policy_file},
    }
    if from_file:
        settings = _read_config(Path(env), set_ or [], _only_given(row, context))
    else:
        settings = _check_options(row | {"env": env, "env_settings": read_pairs(set_)})
        refuse_unused(policy, "vllm:", "--engine-option", engine_option)
        refuse_unused(policy, "openai:", "--policy-option", policy_option)
    plans = _plans(settings, out, from_file)
    results = {}
    for name, plan in plans.items():
        label = f"{name} · {plan.policy}"
        if from_file:
            results[name] = run_with_bar(plan, label)
        else:
            with spelt_as_options():
                results[name] = run_with_bar(plan, label)
        if not as_json:
            _print_summary(results[name], plan.out, name if len(plans) > 1 else "")
    if as_json:
        print_json(next(iter(results.values())) if len(plans) == 1 else {"evaluations": results})
    raise typer.Exit(max(exit_code(result, allow_lost) for result in results.values()))


def _only_given(row: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """The settings whose options were given on the command line, tables merged from several."""
    inside = {
        "chat": ("parser", "on_rewrite", "tool_role", "template_option", "template"),
        "engine": ("engine_option",),
        "served": ("policy_option",),
        "safety": ("policy_file",),
    }

    def is_given(option: str) -> bool:
        source = context.get_parameter_source(option)
        return source is not None and source.name == "COMMANDLINE"

    chosen: dict[str, Any] = {}
    for name, value in row.items():
        given = [option for option in inside.get(name, (name,)) if is_given(option)]
        if given and name == "chat":
            names = {option.replace("template_option", "template_options") for option in given}
            chosen[name] = {key: item for key, item in value.items() if key in names}
        elif given:
            chosen[name] = value
    return chosen


def _read_config(path: Path, overrides: list[str], given: dict[str, Any]) -> EvalSettings:
    """The settings of a file, of which some belong to training alone, with those of options.

    Raises:
        ConfigError: a setting is wrong.
    """
    from agentrl.evaluation.settings import EvalSettings
    from agentrl.trainers.config import TrainConfig, check_config

    row = read_toml(path)
    if stages := row.keys() & {"stage", "stages"}:
        raise ConfigError(
            f"{path}: {min(stages)!r} names offline stages, which play no environment: give the"
            " TOML file of an online run"
        )
    for override in overrides:
        set_value(row, override)
    training = TrainConfig.model_fields.keys() - EvalSettings.model_fields.keys()
    if row.keys() & training:
        known = TrainConfig.model_fields.keys()
        check_config({"model": "-"} | {k: v for k, v in row.items() if k in known}, str(path))
    settings = {name: value for name, value in row.items() if name not in training}
    for name, value in given.items():
        is_table = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = {**settings[name], **value} if is_table else value
    return check(EvalSettings, settings, str(path), overrides=overrides, hint=_training_hint)


def _training_hint(name: str, value: Any) -> str | None:
    """The setting of training that is misspelt."""
    from agentrl.trainers.config import TrainConfig

    near = nearest(name, TrainConfig.model_fields)
    return None if near is None else f"did you mean {near!r}?"


def _check_options(row: dict[str, Any]) -> EvalSettings:
    from agentrl.evaluation.settings import EvalSettings

    return check(EvalSettings, row, "", option=option_of)


def _plans(settings: EvalSettings, out: Path | None, from_file: bool) -> dict[str, EvalPlan]:
    """What is played in each environment, by its name."""
    from agentrl.curriculum.settings import name_in_run
    from agentrl.rollout.play import derive_seed

    # Training derives the seed of its held-out tasks like this.
    seed = derive_seed(settings.seed, settings.split) if from_file else settings.seed
    envs = settings.envs
    if len(envs) == 1:
        return {envs[0].id: settings.plan(envs[0], out, seed=seed)}
    return {
        name_in_run(env): settings.plan(env, out and out / name_in_run(env), seed=seed)
        for env in envs
    }


def _print_summary(result: Mapping[str, Any], out: Path | None, name: str) -> None:
    from agentrl.evaluation.summary import summary_lines

    if name:
        print(plain(f"== {name}"))
    print("\n".join(map(plain, summary_lines(result))))
    if out is not None:
        print(plain(f"records: {out} · agentrl view {out}"))


def exit_code(result: Mapping[str, Any], allow_lost: int) -> int:
    """0 for a complete evaluation, 130 for an interrupted one, else 1 with a sentence."""
    lost, played = result["n_failed_infra"], result["n_episodes"]
    if result["n_missing"]:
        reason = result["stopped"].replace("_", "-") or "cut short"
        print(
            f"agentrl: {reason}: {result['n_missing']} samples were not played; run the same"
            " command with the same --out to play them",
            file=sys.stderr,
        )
        return INTERRUPTED if result["stopped"] == "interrupted" else 1
    if lost <= allow_lost:
        return 1 if lost == played > 0 else 0
    print(
        f"agentrl: infrastructure failed {lost} of {played} episodes, which count nowhere: play"
        f" them again with the same --out, or accept them with --allow-lost {lost}",
        file=sys.stderr,
    )
    return 1


def read_ks(text: str) -> list[int]:
    """The whole numbers of `1,4,8`.

    Raises:
        ConfigError: one is not a whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--k {text!r}: give whole numbers separated by commas, as in 1,4,8", setting="k"
        ) from None


def run_with_bar(plan: EvalPlan, label: str) -> dict[str, Any]:
    """Run an evaluation with a progress bar on the terminal."""
    from agentrl.evaluation.run import EvalProgress
    from agentrl.evaluation.run import evaluate as run
    from agentrl.report.display import console, episode_bar

    with episode_bar(label) as bar:
        progress = EvalProgress(
            lambda total: bar.restart(label, total),
            bar.episode,
            lambda sentence: console.print(sentence, highlight=False, soft_wrap=True),
        )
        return run(plan, progress)
