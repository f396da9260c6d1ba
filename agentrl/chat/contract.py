"""The contract of a chat template with exact tokens, for users to run on their own tokenizer:
`check_chat(chat)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agentrl.chat.tokens import Chat
from agentrl.errors import AgentRLError
from agentrl.trajectory import FinishReason, Segment, Trajectory
from agentrl.types import Message, ToolCall, ToolSpec

Emit = Callable[[list[int]], list[int]]

_TOOL = ToolSpec(
    "lookup", "Look up a word.", {"type": "object", "properties": {"word": {"type": "string"}}}
)


class Played(NamedTuple):
    """One branch of a simulated episode: its trajectory, and what was emitted turn by turn."""

    trajectory: Trajectory
    emitted: list[list[int]]


def simulate(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec], emit: Emit = list
) -> list[Played]:
    """Play a recorded conversation online: an engine emits `emit(canonical ids)` for every
    assistant turn.

    Returns:
        One entry for each branch of history.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    played = [
        Played(Trajectory((Segment.prompt(chat.prompt_ids(messages[: turns[0]], tools)),)), [])
    ]
    for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn, new = messages[index], messages[index + 1 : following]
        ids = emit(chat.turn_ids(turn, new, played[-1].trajectory.ids))
        branch = played[-1].trajectory.extend(Segment.sampled(ids, [-1.0] * len(ids), 0, "stop"))
        played[-1] = Played(branch, [*played[-1].emitted, ids])
        if following == len(messages):
            break
        if chat.needs_new_branch(messages[: index + 1], new, tools):
            played.append(
                Played(
                    Trajectory((Segment.prompt(chat.prompt_ids(messages[:following], tools)),)), []
                )
            )
        else:
            observed = Segment.observation(chat.observation_ids(turn, ids, new, tools, "stop"))
            played[-1] = Played(branch.extend(observed), played[-1].emitted)
    return played


def fragment(chat: Chat, ids: Sequence[int]) -> list[int]:
    """The same text in the longest possible split: every token that can be is replaced by one token
    a character.
    """
    pieces: list[int] = []
    for token in ids:
        text = chat.tokenizer.decode([token], skip_special_tokens=False)
        assert isinstance(text, str)
        split = [piece for character in text for piece in chat.template.encode(character)]
        control = token in chat.tokenizer.added_tokens_decoder
        same = chat.tokenizer.decode(split, skip_special_tokens=False) == text
        pieces += split if same and not control and "\ufffd" not in text else [token]
    return pieces


def check_chat(
    chat: Chat, conversations: Sequence[Sequence[Message]] = (), tools: Sequence[ToolSpec] = ()
) -> list[str]:
    """Every broken promise in one sentence; an empty list for a chat that carries exact tokens.

    Args:
        conversations: further ones to play, alternating as `Chat.render_demonstrations` asks.
        tools: those of the further conversations.
    """
    problems: list[str] = []
    for messages in [*_conversations(chat.template.takes_system), *conversations]:
        try:
            problems += _check_conversation(
                chat, messages, tools if messages in conversations else [_TOOL]
            )
        except AgentRLError as error:
            problems.append(f"playing {_shape(messages)} raises {type(error).__name__}: {error}")
    problems += _check_control_tokens(chat)
    return list(dict.fromkeys(problems))


def _check_conversation(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> Iterator[str]:
    shape = _shape(messages)
    plain = simulate(chat, messages, tools)
    split = simulate(chat, messages, tools, lambda ids: fragment(chat, ids))
    for branch in split:
        if not exact(branch):
            yield (
                f"{shape}: training ids, mask or log-probabilities are not those of the emitted"
                " tokens"
            )
    if [_others(branch) for branch in plain] != [_others(branch) for branch in split]:
        yield f"{shape}: observation tokens depend on how the engine split the sampled text"
    rows = [(list(branch.trajectory.ids), list(branch.trajectory.mask)) for branch in plain]
    if rows != [(row.input_ids, row.mask) for row in chat.render_demonstrations(messages, tools)]:
        yield f"{shape}: a demonstration's ids or mask differ from online play of the same text"
    yield from _check_turns(chat, messages, tools, shape)
    if not chat.rewrites_history and chat.template.verbatim:
        yield from _check_text(chat, messages, tools, plain[0])


def exact(played: Played) -> bool:
    """Whether the trajectory trains the emitted ids and nothing else, at every turn."""
    trajectory = played.trajectory
    for end in range(1, len(trajectory.segments) + 1):
        part = Trajectory(trajectory.segments[:end])
        if not len(part.ids) == len(part.mask) == len(part.logprobs):
            return False
    trained = [token for token, mask in zip(trajectory.ids, trajectory.mask, strict=True) if mask]
    return trained == [token for ids in played.emitted for token in ids]


def _others(played: Played) -> list[tuple[int, ...]]:
    return [segment.ids for segment in played.trajectory.segments if not segment.logprobs]


def _check_turns(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec], shape: str
) -> Iterator[str]:
    """Stop tokens: trained, never doubled, and supplied where a turn was cut; and what is parsed
    back.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn, new = messages[index], messages[index + 1 : following]
        ids = chat.turn_ids(turn, new)
        if ids[-1] not in chat.stop_ids:
            yield f"{shape}: an assistant turn does not end with a trained stop token"
            continue
        if chat.parse(ids) != turn or chat.parse(fragment(chat, ids)) != turn:
            yield f"{shape}: parsing an assistant turn's tokens does not give the turn back"
        if not new:
            continue
        stopped, cut = (_observe(chat, turn, sampled, new, tools) for sampled in (ids, ids[:-1]))
        if stopped[:1] == ids[-1:]:
            yield f"{shape}: the observation repeats the stop token that was sampled"
        written = chat.template.encode(chat.template.suffix(turn, new, tools))
        if cut != written or stopped != written[int(written[0] == ids[-1]) :]:
            yield (
                f"{shape}: a turn that was cut by length is not closed by the stop token in the"
                " observation"
            )


def _observe(
    chat: Chat, turn: Message, ids: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    finish: FinishReason = "stop" if ids and ids[-1] in chat.stop_ids else "length"
    return chat.observation_ids(turn, ids, new, tools, finish)


def _check_text(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec], played: Played
) -> Iterator[str]:
    """What the policy saw before its last turn is what the template writes, letter by letter."""
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    ids = list(played.trajectory.ids)[: -len(played.emitted[-1])]
    if _read(chat, ids) != _read(chat, chat.prompt_ids(messages[:last], tools)):
        yield f"{_shape(messages)}: the tokens of online play do not spell what the template writes"


def _read(chat: Chat, ids: list[int]) -> object:
    return chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _check_control_tokens(chat: Chat) -> Iterator[str]:
    """A tool result that spells a control token must not produce one."""
    call = ToolCall(_TOOL.name, {})
    turn = Message.assistant("", call)
    harmless = _observe(chat, turn, [], [Message.tool("nothing", call)], [_TOOL])
    for token, added in chat.tokenizer.added_tokens_decoder.items():
        if not added.special:
            continue
        ids = _observe(chat, turn, [], [Message.tool(f"a{added.content}b", call)], [_TOOL])
        if ids.count(token) != harmless.count(token):
            yield f"a tool result that spells {added.content!r} becomes that control token"


def _shape(messages: Sequence[Message]) -> str:
    return f"conversation ({', '.join(message.role for message in messages)})"


def _conversations(system: bool) -> list[list[Message]]:
    first, second = (
        ToolCall("lookup", {"word": "café"}),
        ToolCall("lookup", {"word": "x < y", "n": 2}),
    )
    start = [Message.system("Be brief."), Message.user("What is it?")][0 if system else 1 :]
    once = [*start, Message.assistant("I will look.", first), Message.tool("a house", first)]
    twice = [
        *once,
        Message.assistant("", first, second),
        Message.tool("a house", first),
        Message.tool("3", second),
    ]
    thought = Message("assistant", "It is a house.", reasoning="The word is French.")
    talk = [*twice, thought, Message.user("Sure?"), Message.assistant("Yes.")]
    return [[*start, Message.assistant("Four.")], [*once, Message.assistant("A house.")], talk]
