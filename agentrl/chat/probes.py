"""What a chat template does, found by rendering conversations made of what episodes are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.rows import SENTINEL, CallStyle, ToolRole
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.types import Message, ToolCall, ToolSpec

PROBE_TOOL = ToolSpec(
    "probe_tool", "Answers.", {"type": "object", "properties": {"value": {"type": "integer"}}}
)
_FLOW = re.compile(r"</?think>|\s")


def probe(template: Template, tool_role: ToolRole) -> None:
    """Find out what exact tokens need, and write it into the template's attributes.

    Args:
        tool_role: "auto" takes the role of tools where the template shows what they answer.

    Raises:
        TemplateError: a template that refuses tool results or drops their text, or has no control
            token after a turn.
    """
    template.takes_system = _takes_system(template)
    _probe_results(template, tool_role)
    opening = template.render([Message.user("Hi")])
    begin = template.form.think[0]
    if opening.rstrip().endswith(begin):
        template.thinking = opening[opening.rindex(begin) :]
    if not template.suffix(probe_turn(1), probe_results(1)).startswith(template.end_text):
        template.end_text = ""
    shown = template.render([Message.user("Hi")], [PROBE_TOOL])
    template.shows_tools = PROBE_TOOL.name in shown
    template.tools_matter = _tools_matter(template)
    template.reads_own = _reads_own(template)
    _probe_history(template)


def _takes_system(template: Template) -> bool:
    try:
        return "Be brief." in template.render([Message.system("Be brief."), Message.user("Hi")])
    except TemplateError:
        return False


def _probe_results(template: Template, tool_role: ToolRole) -> None:
    """Choose the role of tool results, and the style of calls that it needs."""
    roles: Sequence[ToolRole] = ("tool", "user") if tool_role == "auto" else (tool_role,)
    for role in roles:
        template.tool_role = role
        try:
            template.style = _style(template)
        except TemplateError:
            if role == roles[-1]:
                raise
        else:
            break
    _probe_end(template)


def _style(template: Template) -> CallStyle:
    """Plain, unless only `tool_calls` make the template render tool results, or render them its
    own way, or unless the template does not write a plain turn as it is.
    """
    suffixes: dict[CallStyle, str] = {}
    refusals: list[TemplateError] = []
    results = probe_results(1)
    for style in ("plain", "object", "json"):
        template.style = style
        try:
            _probe_end(template)
            suffixes[style] = template.suffix(probe_turn(1), results, [PROBE_TOOL])
        except TemplateError as error:
            refusals.append(error)
    shown: list[CallStyle] = [style for style in suffixes if results[0].content in suffixes[style]]
    calls = next((style for style in shown if style != "plain"), None)
    if "plain" in shown and (
        calls is None
        or (suffixes[calls].endswith(suffixes["plain"]) and _writes_plain_turns(template))
    ):
        return "plain"
    if calls is not None:
        return calls
    if suffixes:
        raise template.error("drops the text of tool results", "set chat.tool_role to 'user'")
    raise TemplateError(f"{refusals[0]}, or set chat.tool_role to 'user'")


def _writes_plain_turns(template: Template) -> bool:
    """Whether the text of a turn that is handed over as content is written where a turn begins."""
    template.style = "plain"
    turn = probe_turn(1)
    seen = template.render([Message.user("Hi")])
    now = template.render([Message.user("Hi"), turn, *probe_results(1)])
    start = 0 if now.startswith(seen) else -1
    shown = now[len(seen) :] if start == 0 else now
    wanted = _FLOW.sub("", template.guard(template.form.turn(turn), template.turn_pattern))
    found = _FLOW.sub("", shown)
    return found.startswith(wanted) if start == 0 else wanted in found


def _probe_end(template: Template) -> None:
    """Find the token that ends a turn, and what stands between the turn's text and it."""
    turn = Message.assistant(SENTINEL)
    after = template.render([Message.user("Hi"), turn, Message.user("Go on")])
    start = after.find(SENTINEL) + len(SENTINEL)
    first = template.first_control(after, start if start >= len(SENTINEL) else -1)
    template.before_stop = after[start:first]
    alone = template.render([Message.user("Hi"), turn], generation=False)
    template.last_text = template.control_at(alone, alone.find(SENTINEL))
    template.end_text = template.last_text if after.startswith(template.last_text, first) else ""


def _tools_matter(template: Template) -> bool:
    turn, results = probe_turn(1), probe_results(1)
    return template.suffix(turn, results) != template.suffix(turn, results, [PROBE_TOOL])


def _reads_own(template: Template) -> bool:
    if template.style == "plain":
        return True
    turn = probe_turn(1)
    text = template.render([Message.user("Hi"), turn], generation=False)
    return template.form.parse(text).calls == turn.tool_calls


def _probe_history(template: Template) -> None:
    """See whether earlier text changes when messages are added, over what an episode can have."""
    for follow_up, messages in probe_conversations(system=template.takes_system):
        found = template.difference(messages, [PROBE_TOOL])
        if found == "place":
            template.unsteady = (
                "renders a message differently depending on its place in the conversation"
            )
        if found == "opening" and not follow_up:
            template.unsteady = (
                "is not prefix-stable: tool results change the text before the first turn"
            )
        template.verbatim = template.verbatim and found is None
        if found not in (None, "wording"):
            template.rewrites_history = True


def probe_turn(calls: int, reasoning: str = "", content: str = "I will ask.") -> Message:
    """An assistant turn with so many calls."""
    asked = tuple(ToolCall(PROBE_TOOL.name, {"value": index}) for index in range(calls))
    return Message("assistant", content, asked, reasoning=reasoning)


def probe_results(count: int) -> list[Message]:
    """The results of a turn's calls."""
    return [
        Message.tool(f"result number {index}", ToolCall(PROBE_TOOL.name, {}))
        for index in range(count)
    ]


def probe_conversations(*, system: bool) -> list[tuple[bool, list[Message]]]:
    """(has a user follow-up, messages): one and several results, follow-ups, all of it with and
    without thinking.
    """
    conversations = []
    for why in ("", "because of this"):
        start = [Message.system("Be brief."), Message.user("What is it?")][0 if system else 1 :]
        with_tools = [
            *start,
            probe_turn(1, why),
            *probe_results(1),
            probe_turn(2, why, ""),
            *probe_results(2),
            probe_turn(1, why, "Once more."),
            *probe_results(1),
        ]
        answer = probe_turn(0, why, "It is four.")
        with_user = [
            *with_tools,
            answer,
            Message.user("And then?"),
            probe_turn(0, why, "Five."),
            Message.user("So?"),
        ]
        conversations += [
            (False, with_tools),
            (True, with_user),
            (True, [*start, answer, Message.user("And then?")]),
        ]
    return conversations
