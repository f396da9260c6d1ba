"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.errors import ConfigError, TemplateError
from agentrl.records.plain import plain
from agentrl.settings import check, read_pairs

if TYPE_CHECKING:
    from agentrl.chat.settings import ChatSettings
    from agentrl.engines.base import EngineSettings
    from agentrl.types import LimitSettings

Env = Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Sandbox = Annotated[str, typer.Option(help="Where code runs: auto, docker, bubblewrap or process.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="With --sandbox process: allow an environment marked untrusted to run without"
        " isolation.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting of the environment; repeatable."
    ),
]
SetConfig = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file; repeatable."),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limits",
        metavar="KEY=VALUE",
        help="Change a limit of the episodes, as in turn_tokens=4096; repeatable.",
    ),
]
Split = Annotated[str, typer.Option(help="Split of the environment.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature.")]
RunEnv = Annotated[
    str, typer.Option("--env", help="Environment, if the run does not record which it was.")
]
Run = Annotated[Path, typer.Argument(help="Folder of an evaluation or a training run.")]

Parser = Annotated[
    str, typer.Option(help="Tool-call format of the model; auto reads it from its chat template.")
]
OnRewrite = Annotated[
    str,
    typer.Option(
        help="If the chat template rewrites earlier turns: branch, keep (append anyway) or refuse."
    ),
]
ToolRole = Annotated[
    str,
    typer.Option(help="Role of tool results: tool or user; auto uses user if there is no other."),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option",
        metavar="KEY=VALUE",
        help="Set a variable of the chat template; repeatable.",
    ),
]
ChatTemplate = Annotated[
    str,
    typer.Option(
        "--template",
        help="Chat template for a model without one: chatml, plain or a jinja file.",
    ),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="KEY=VALUE",
        help="Change a setting of vLLM, as in max_model_len=4096; repeatable.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy-option",
        metavar="KEY=VALUE",
        help="Change how an openai: model is asked (timeout_s, retries, concurrency,"
        " requests_per_minute, tokens=true, …), or add a parameter to its requests, as in"
        " top_p=0.9; repeatable.",
    ),
]

_CHAT_OPTIONS = {"template_options": "template-option"}
_TABLES = {
    "engine": "--engine-option ",
    "served": "--policy-option ",
    "limits": "--limits ",
    "env_settings": "--set ",
}


def option_of(setting: str) -> str:
    """How a command spells a setting, as "--top-k" for `top_k`."""
    table, dot, name = setting.partition(".")
    if table in _TABLES:
        return f"{_TABLES[table]}{name}=" if dot else _TABLES[table].strip()
    if setting == "safety.policy":
        return "--policy-file"
    name = name.partition(".")[0] if dot else table
    return f"--{_CHAT_OPTIONS.get(name, name).replace('_', '-')}"


@contextmanager
def spelt_as_options() -> Iterator[None]:
    """Name options instead of settings in errors about a chat template."""
    try:
        yield
    except (ConfigError, TemplateError) as error:
        raise type(error)(spell_options(str(error)), setting=error.setting) from error


def spell_options(text: str) -> str:
    """The text of an error with options in place of the settings of `chat`."""
    return re.sub(
        r"\bchat\.(\w+)(=?)",
        lambda found: option_of(f"chat.{found[1]}") + (" " if found[2] else ""),
        text,
    )


def chat_settings(
    parser: str,
    on_rewrite: str = "branch",
    tool_role: str = "auto",
    template_option: list[str] | None = None,
    template: str = "",
) -> ChatSettings:
    """The chat settings that a command's options give.

    Raises:
        ConfigError: an option is wrong.
    """
    from agentrl.chat.settings import ChatSettings

    row = chat_row(parser, on_rewrite, tool_role, template_option, template)
    return check(ChatSettings, row, "", option=option_of)


def chat_row(
    parser: str,
    on_rewrite: str,
    tool_role: str,
    template_option: list[str] | None,
    template: str,
) -> dict[str, Any]:
    """The options of a chat as the values of its settings."""
    return {
        "parser": parser,
        "on_rewrite": on_rewrite,
        "tool_role": tool_role,
        "template_options": read_pairs(template_option, "--template-option"),
        "template": template,
    }


def vllm_row(engine_option: list[str] | None) -> dict[str, Any]:
    """The settings of a vLLM that has the GPU for itself, as plain values."""
    from agentrl.engines.base import VLLM

    return VLLM.model_dump() | read_pairs(engine_option, "--engine-option")


def vllm_settings(engine_option: list[str] | None) -> EngineSettings:
    """The settings of a vLLM that has the GPU for itself.

    Raises:
        ConfigError: an option is wrong.
    """
    from agentrl.engines.base import EngineSettings

    row = vllm_row(engine_option)
    return check(EngineSettings, row, "", option=lambda name: f"--engine-option {name}=")


def read_limits(pairs: list[str] | None) -> LimitSettings:
    """The limits of `--limits`.

    Raises:
        ConfigError: a limit is unknown or has a wrong value.
    """
    from agentrl.types import LimitSettings

    row = read_pairs(pairs, "--limits")
    return check(LimitSettings, row, "--limits" if not row else "", option=_limit_option)


def _limit_option(name: str) -> str:
    return f"--limits {name}="


def refuse_unused(policy: str, kind: str, option: str, given: list[str] | None) -> None:
    """Refuse options that do nothing for this kind of policy.

    Raises:
        ConfigError: some are given.
    """
    if given and not policy.startswith(kind):
        raise ConfigError(
            f"{option} {given[0]} does nothing for --policy {policy}: leave it out, or use"
            f" {kind}MODEL",
            setting=option.lstrip("-").replace("-", "_"),
        )


def trusted(sandbox: str, trust: bool) -> str:
    """The name of a sandbox, marked if the user trusts the environment.

    Raises:
        ConfigError: `--trust` was given for a sandbox that needs no trust.
    """
    if trust and sandbox != "process":
        raise ConfigError(
            f"--trust goes with --sandbox process, not with --sandbox {sandbox}: leave it out",
            setting="trust",
        )
    if not trust:
        return sandbox
    from agentrl.sandboxes import TRUSTED

    return TRUSTED


def print_json(result: Any) -> None:
    """Print one JSON object on its own line; numbers that JSON lacks become text, as "inf"."""
    print(plain(json.dumps(_finite(result), ensure_ascii=False, default=str, allow_nan=False)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
