"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml, plain

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.chat.settings import ChatSettings
    from agentrl.engines.settings import EngineSettings
    from agentrl.policies.options import ServedOptions

Settings = TypeVar("Settings", bound="BaseModel")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Sandbox = Annotated[str, typer.Option(help="Where code runs: auto, docker, bubblewrap or process.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="With --sandbox process: run an environment there that says it is untrusted.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting to change; repeatable."),
]

Parser = Annotated[
    str,
    typer.Option(help="Tool-call format of an hf: model; auto: the one its chat template writes."),
]
OnRewrite = Annotated[
    str,
    typer.Option(help="Where the chat template changes earlier turns: branch, keep or refuse."),
]
ToolRole = Annotated[
    str,
    typer.Option(help="Role of tool results: tool or user; auto: user where there is no other."),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option", metavar="KEY=VALUE", help="A variable of the template; repeatable."
    ),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="KEY=VALUE",
        help="A setting of vLLM, as in max_model_len=4096; repeatable.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy-option",
        metavar="KEY=VALUE",
        help="Of an openai: model: timeout_s, retries, concurrency, requests_per_minute,"
        " tokens=true and so on, or any parameter of its requests, as top_p=0.9; repeatable.",
    ),
]
ChatTemplate = Annotated[
    str,
    typer.Option(
        "--template", help="Chat template of a model without one: chatml, plain or a jinja file."
    ),
]


def chat_settings(
    parser: str, on_rewrite: str, tool_role: str, template_option: list[str] | None, template: str
) -> ChatSettings:
    """The settings of a chat from the options of a command.

    Raises:
        ConfigError: one sentence with the option and what is wrong with it.
    """
    from agentrl.chat.settings import ChatSettings

    row: dict[str, Any] = {
        "parser": parser,
        "on_rewrite": on_rewrite,
        "tool_role": tool_role,
        "template_options": read_settings(template_option, "--template-option"),
        "template": template,
    }
    return _checked(ChatSettings, row, lambda field: f"--{field.replace('_', '-')}")


def vllm_settings(engine_option: list[str] | None) -> EngineSettings:
    """The settings of vLLM, with nothing beside it, from the options of a command.

    Raises:
        ConfigError: one sentence with the option and what is wrong with it.
    """
    from agentrl.engines.settings import VLLM, EngineSettings

    row = VLLM.model_dump() | read_settings(engine_option, "--engine-option")
    return _checked(EngineSettings, row, lambda field: f"--engine-option {field}=")


def engine_of(policy: str, engine_option: list[str] | None) -> EngineSettings:
    """The settings of vLLM for a policy by name.

    Raises:
        ConfigError: they are given and the policy samples from something else.
    """
    _refuse_for_others(policy, "vllm:", "--engine-option", "a setting of vLLM", engine_option)
    return vllm_settings(engine_option)


def served_options(policy: str, policy_option: list[str] | None) -> ServedOptions:
    """The options of a served model for a policy by name.

    Raises:
        ConfigError: one sentence with the option and what is wrong with it.
    """
    from agentrl.policies.options import ServedOptions

    _refuse_for_others(
        policy, "openai:", "--policy-option", "an option of a served model", policy_option
    )
    option = "--policy-option"
    return ServedOptions.read(read_settings(policy_option, option), option)


def _refuse_for_others(
    policy: str, kind: str, option: str, what: str, given: list[str] | None
) -> None:
    if given and not policy.startswith(kind):
        raise ConfigError(
            f"{option} {given[0]} is {what} and does nothing for --policy {policy}: leave it out,"
            f" or use {kind}MODEL"
        )


def _checked(kind: type[Settings], row: dict[str, Any], option: Callable[[str], str]) -> Settings:
    from pydantic import ValidationError

    from agentrl.chat.settings import one_of_these

    try:
        return kind.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        said = problem["msg"].removeprefix("Value error, ").lower()
        if not problem["loc"]:
            raise ConfigError(f"{option('')}: {said}") from None
        if problem["type"] == "literal_error":
            said = one_of_these(problem["input"], problem["ctx"]["expected"])
        raise ConfigError(
            f"{option(str(problem['loc'][0]))} {as_toml(problem['input'])}: {said}"
        ) from None


def read_settings(pairs: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """`key=value` pairs; values are read as JSON where they are JSON, else as text.

    Raises:
        ConfigError: a pair has no key or no equals sign.
    """
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise ConfigError(f"{option} {pair!r}: write it as key=value")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


def trusted(sandbox: str, trust: bool) -> str:
    """The name of a sandbox, with the word of trust where it was said.

    Raises:
        ConfigError: it was said of a sandbox that needs none.
    """
    if trust and sandbox != "process":
        raise ConfigError(
            f"--trust goes with --sandbox process, not with --sandbox {sandbox}: only that is no"
            " boundary"
        )
    if not trust:
        return sandbox
    from agentrl.sandboxes import TRUSTED

    return TRUSTED


def print_json(result: Any) -> None:
    """One JSON object on a line of its own; numbers that JSON does not have are text, as "inf"."""
    print(plain(json.dumps(_finite(result), ensure_ascii=False, default=str, allow_nan=False)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
