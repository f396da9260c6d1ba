"""`agentrl list`, `new`, `check`, `convert`: environments, models, contracts and task files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import (
    ChatTemplate,
    Json,
    OnRewrite,
    Parser,
    Sandbox,
    Set,
    TemplateOption,
    ToolRole,
    Trust,
    chat_settings,
    print_json,
    read_settings,
    trusted,
)
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.chat.settings import ChatSettings


def list_environments(as_json: Json = False) -> None:
    """List environments with version, task counts and sandbox needs."""
    from agentrl.registry import describe, environment_ids

    rows = [describe(env_id) for env_id in environment_ids()]
    if as_json:
        print_json({"environments": rows})
        return
    for row in rows:
        count = "endless" if row["tasks"] is None else row["tasks"]
        print(f"{row['id']:<16} tasks: {count!s:<9} sandbox: {row['sandbox']:<9} {row['summary']}")


def new(
    name: Annotated[str, typer.Argument(help="Name of the environment, as in word-count.")],
    folder: Annotated[Path, typer.Option("--out", help="Where to write it.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a new environment file with its test."""
    from agentrl.cli.scaffold import try_it, write_environment

    files = write_environment(name, folder)
    if as_json:
        print_json({"files": [str(path) for path in files]})
        return
    print("\n".join(f"wrote {path}" for path in files))
    print("\n".join(f"try it: {command}" for command in try_it(*files)))


def check(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, path/to/file.py:Class, or hf:MODEL.")],
    set_: Set = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks per split that are tried.")] = 8,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    on_rewrite: OnRewrite = "branch",
    tool_role: ToolRole = "auto",
    template_option: TemplateOption = None,
    template: ChatTemplate = "",
    as_json: Json = False,
) -> None:
    """Check the contract of an environment, or of a model's chat template, in words."""
    if env.startswith("hf:"):
        settings = chat_settings(parser, on_rewrite, tool_role, template_option, template)
        raise typer.Exit(_check_model(env.removeprefix("hf:"), settings, as_json))
    from agentrl.evaluation.contract import check_named

    findings = check_named(env, read_settings(set_), n_tasks=tasks, sandbox=trusted(sandbox, trust))
    broken = [finding for finding in findings if finding.problem]
    rules = [
        {"rule": found.rule, "ok": not found.problem, "problem": found.problem}
        for found in findings
    ]
    if as_json:
        print_json({"ok": not broken, "rules": rules})
    else:
        for rule in rules:
            print(
                f"ok      {rule['rule']}"
                if rule["ok"]
                else f"BROKEN  {rule['rule']}: {rule['problem']}"
            )
    raise typer.Exit(1 if broken else 0)


def _check_model(model: str, settings: ChatSettings, as_json: bool) -> int:
    """Say what a model's chat template does and which promises it breaks; 1 if it breaks one."""
    try:
        from agentrl.engines.factory import check_model
    except ImportError as error:
        raise ConfigError(
            f"check hf:{model} needs torch and transformers: pip install 'agentrl[train]'"
        ) from error
    found = check_model(model, settings)
    if as_json:
        print_json(found)
    else:
        print("\n".join(_in_words(found)))
    return 1 if found["problems"] else 0


def _in_words(found: dict[str, Any]) -> Iterator[str]:
    yield f"model              {found['model']}"
    if found["parser"] is not None:
        mark = "reads two calls as the template writes them" if found["round_trip"] else "misreads"
        yield f"parser             {found['parser']}: {mark}"
        yield f"tool results       as {found['tool_role']} messages"
        shown = "shown by" if found["shows_tools"] else "not shown by"
        yield f"tools              {shown} the template"
        if found["rewrites_history"]:
            yield f"earlier turns      rewritten by the template: {found['on_rewrite']}"
        else:
            yield "earlier turns      kept as they were"
    for problem in found["problems"]:
        yield f"BROKEN  {problem}"
    if not found["problems"]:
        yield "ok      every promise of exact tokens holds"


def convert(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="mbpp, mbppplus or humaneval.")],
    source: Annotated[Path, typer.Argument(help="File in that format; .gz is fine.")],
    target: Annotated[Path, typer.Argument(help="Task file to write.")],
    as_json: Json = False,
) -> None:
    """Turn a public task format into a task file."""
    from agentrl.cli.formats import convert as run

    count = run(format_, source, target)
    if as_json:
        print_json({"tasks": count, "out": str(target)})
    else:
        print(f"wrote {count} tasks to {target}")
