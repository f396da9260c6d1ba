"""The settings of a chat, as files and commands give them."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from agentrl.settings import STRICT

if TYPE_CHECKING:
    from agentrl.chat.tokens import Chat

ParserName = Literal[
    "auto",
    "hermes",
    "xml",
    "glm",
    "deepseek",
    "cohere",
    "mistral",
    "llama_json",
    "python",
    "lfm2",
    "gemma",
    "harmony",
    "atem",
]


class ChatSettings(BaseModel):
    """How messages become a model's tokens, and its tokens messages."""

    model_config = STRICT

    parser: ParserName = "auto"
    """Tool-call format; "auto": the one in which the model's chat template writes calls."""
    on_rewrite: Literal["branch", "keep", "refuse"] = "branch"
    """If the template changes earlier turns: open a new branch, append anyway, or stop."""
    tool_role: Literal["auto", "tool", "user"] = "auto"
    """Role of tool results; "auto": "tool", or "user" if the template has no such role."""
    template_options: dict[str, Any] = {}
    """Variables of the chat template: `{enable_thinking = false}`."""
    template: str = ""
    """Chat template to use: `chatml`, `plain` or a jinja file (empty = the model's own)."""

    def found(self, chat: Chat) -> ChatSettings:
        """These settings with what "auto" became."""
        chosen = {"parser": chat.parser, "tool_role": chat.template.tool_role}
        return self.model_copy(update=chosen)


def one_of_these(value: object, expected: str) -> str:
    """What is wrong with a value that is none of those allowed, and the nearest one.

    Args:
        value: what was given.
        expected: those allowed, as pydantic lists them: "'branch', 'keep' or 'refuse'".
    """
    near = difflib.get_close_matches(str(value).lower(), re.findall(r"'(.*?)'", expected), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be {expected}{hint}"


def in_words(chat: Chat) -> str:
    """One line on what was chosen, for people."""
    template = chat.template
    parts = [
        f"parser {chat.parser}",
        "tool results as user messages" if template.tool_role == "user" else "",
        "" if template.takes_system else "system message in the first user message",
        "" if chat.shows_tools else "tools described in the system message",
        f"earlier turns are rewritten: {chat.on_rewrite}" if chat.rewrites_history else "",
    ]
    return "chat: " + "; ".join(filter(None, parts))
