"""A model's name and the settings of its chat -> what plays, in training and evaluation alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.contract import check_chat
from agentrl.chat.settings import ChatSettings
from agentrl.chat.shipped import template_text
from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_tokenizer, transformers_engine
from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.engines.transformers import TransformersEngine


def open_chat(model: str | Path, settings: ChatSettings | None = None) -> Chat:
    """The chat of a model's tokenizer, with what its settings leave open found out.

    Raises:
        ConfigError: there is no such model or template, or no tokenizer that can be loaded.
        TemplateError: the chat template cannot carry exact tokens; the sentence names a setting.
    """
    settings = settings or ChatSettings()
    tokenizer = load_tokenizer(model)
    if settings.template:
        tokenizer.chat_template = template_text(settings.template)
    tokenizer.name_or_path = tokenizer.name_or_path or str(model)
    return Chat(
        tokenizer,
        settings.parser,
        settings.on_rewrite,
        template_options=settings.template_options,
        tool_role=settings.tool_role,
    )


def open_engine(
    model: PreTrainedModel, chat: Chat, *, synchronous: bool = False
) -> TransformersEngine:
    """The engine that samples turns of a chat with a loaded model."""
    return transformers_engine(model, chat, synchronous=synchronous)


def check_model(model: str | Path, settings: ChatSettings | None = None) -> dict[str, Any]:
    """Run the contract of a chat template on a model's own tokenizer.

    Returns:
        model, parser, on_rewrite, tool_role, rewrites_history, shows_tools, round_trip, and
        problems: every broken promise in one sentence. Where the template is refused, that is the
        problem, and what was not found out is None.

    Raises:
        ConfigError: there is no such model or template, or no tokenizer that can be loaded.
    """
    settings = settings or ChatSettings()
    row: dict[str, Any] = {"model": str(model), "parser": None, "on_rewrite": settings.on_rewrite}
    row |= dict.fromkeys(("tool_role", "rewrites_history", "shows_tools", "round_trip"))
    try:
        chat = open_chat(model, settings)
    except TemplateError as error:
        return row | {"round_trip": False, "problems": [str(error)]}
    problems = check_chat(chat)
    if not chat.round_trip:
        problems.insert(
            0,
            f"parser {chat.parser} does not read back the calls that the template writes; set"
            " chat.parser to 'auto'",
        )
    return row | {
        "parser": chat.parser,
        "tool_role": chat.template.tool_role,
        "rewrites_history": chat.rewrites_history,
        "shows_tools": chat.shows_tools,
        "round_trip": chat.round_trip,
        "problems": problems,
    }
