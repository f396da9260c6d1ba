"""`agentrl check`: the contract of an environment, or of a model's chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import (
    ChatTemplate,
    Json,
    LimitOption,
    OnRewrite,
    Parser,
    Sandbox,
    Set,
    TemplateOption,
    ToolRole,
    Trust,
    chat_settings,
    print_json,
    read_limits,
    spell_options,
    spelt_as_options,
    trusted,
)
from agentrl.errors import ConfigError
from agentrl.settings import read_pairs

if TYPE_CHECKING:
    from agentrl.chat.settings import ChatSettings


def check(
    env: Annotated[str, typer.Argument(help="Environment id, path/to/file.py:Class, or hf:MODEL.")],
    set_: Set = None,
    limits: LimitOption = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks per split to try.")] = 8,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    parser: Parser = "auto",
    on_rewrite: OnRewrite = "branch",
    tool_role: ToolRole = "auto",
    template_option: TemplateOption = None,
    template: ChatTemplate = "",
    as_json: Json = False,
) -> None:
    """Check an environment rule by rule, or whether a model's chat template keeps tokens exact."""
    if env.startswith("hf:"):
        settings = chat_settings(parser, on_rewrite, tool_role, template_option, template)
        with spelt_as_options():
            code = _check_model(env.removeprefix("hf:"), settings, as_json)
        raise typer.Exit(code)
    from agentrl.evaluation.contract import check_named

    results = check_named(
        env,
        read_pairs(set_),
        limits=read_limits(limits),
        n_tasks=tasks,
        sandbox=trusted(sandbox, trust),
    )
    rules = [
        {"rule": result.rule, "ok": not result.problem, "problem": result.problem}
        for result in results
    ]
    is_ok = all(rule["ok"] for rule in rules)
    if as_json:
        print_json({"ok": is_ok, "rules": rules})
        raise typer.Exit(0 if is_ok else 1)
    for rule in rules:
        if rule["ok"]:
            print(f"ok      {rule['rule']}")
        else:
            print(f"BROKEN  {rule['rule']}: {rule['problem']}")
    raise typer.Exit(0 if is_ok else 1)


def _check_model(model: str, settings: ChatSettings, as_json: bool) -> int:
    """Print what a model's chat template does and what it breaks; return the exit code."""
    try:
        from agentrl.engines.factory import check_model
    except ImportError as error:
        raise ConfigError(
            f"check hf:{model} needs torch and transformers: pip install 'agentrl[train]'"
        ) from error
    contract = check_model(model, settings)
    contract["problems"] = [spell_options(problem) for problem in contract["problems"]]
    if as_json:
        print_json(contract)
    else:
        print("\n".join(_describe(contract)))
    return 1 if contract["problems"] else 0


def _describe(contract: dict[str, Any]) -> Iterator[str]:
    yield f"model              {contract['model']}"
    if contract["parser"] is not None:
        mark = "reads two calls as the template writes them"
        if not contract["round_trip"]:
            mark = "misreads calls"
        yield f"parser             {contract['parser']}: {mark}"
        yield f"tool results       as {contract['tool_role']} messages"
        shown = "shown by" if contract["shows_tools"] else "not shown by"
        yield f"tools              {shown} the template"
        if contract["rewrites_history"]:
            yield f"earlier turns      rewritten by the template: {contract['on_rewrite']}"
        else:
            yield "earlier turns      kept as they were"
    for problem in contract["problems"]:
        yield f"BROKEN  {problem}"
    if not contract["problems"]:
        yield "ok      every promise of exact tokens holds"
