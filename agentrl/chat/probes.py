"""The conversations that a chat template is probed with: made of what episodes are made of."""

from __future__ import annotations

from agentrl.types import Message, ToolCall, ToolSpec

PROBE_TOOL = ToolSpec(
    "probe_tool", "Answers.", {"type": "object", "properties": {"value": {"type": "integer"}}}
)


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
            probe_turn(2, why, "Again."),
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
