"""The calls of an episode with their answers, for verifiers that reach the final state anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.types import BadCall, Message, ToolCall


def answered_calls(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str]]:
    """The calls that were answered without an error, in order, with what the agent saw."""
    due: list[ToolCall | BadCall] = []
    for message in messages:
        if message.role == "assistant":
            due = list(message.tool_calls)
        elif message.role == "tool" and due:
            call = due.pop(0)
            if isinstance(call, ToolCall) and not message.content.startswith("error: "):
                yield call, message.content
