"""Tiny byte-level BPE tokenizers with chat templates of the shapes that are in use; all written for
these tests.

And a conversation that is held in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl.chat.tokens import Chat
from agentrl.types import Message, ToolCall, ToolSpec

_CORPUS = [
    "hello world, the tool result is 42 and the answer is four",
    '{"name": "search", "arguments": {"query": "hello", "limit": 3}}',
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n<think>\n</think>\n",
    "you may call the tools below; be brief. What is it? I will ask. Once more.",
]

CHATML_TOOLS = """\
{%- if messages[0].role == 'system' or tools -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'Be helpful.' }}
{%- if tools %}

Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}
<|im_end|>
{% endif -%}
"""

# End token owned by the turn, a newline behind it that is never sampled, tool results inside a user
# turn.
QWEN25 = (
    CHATML_TOOLS
    + """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif -%}
{%- for c in m.tool_calls -%}
{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
)

# The same frame; thinking of turns before the last user message is dropped, the last turn always
# shows a block.
QWEN3 = (
    CHATML_TOOLS
    + """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
{%- elif m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{%- set said = parts[-1].lstrip('\n') if parts | length > 1 else m.content -%}
{%- set why = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or why) %}{{ '<think>\n' + why + '\n</think>\n\n' }}{% endif -%}
{{ said }}
{%- for c in m.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
)

# As above, and the generation prompt opens the block for the model.
QWEN3_THINKING = (
    QWEN3.removesuffix("<|im_start|>assistant\n' }}{% endif -%}\n")
    + "<|im_start|>assistant\n<think>\n' }}{% endif -%}\n"
)

# Header tokens, a BOS that the template writes, content trimmed, one call at most when calls are
# structured.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages -%}
{%- if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('only single tool calls') }}{% endif -%}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if loop.first and tools %}{{ 'Tools: ' + tools | tojson + '\n\n' }}{% endif -%}
{%- if m.tool_calls -%}
{%- set function = m.tool_calls[0].function -%}
{{ '{"name": "' + function.name + '", "parameters": ' }}{{ function.arguments | tojson }}{{ '}' }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- else %}{{ m.content | trim }}
{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""

# No end-of-turn token: the header of the next message ends the turn.
GLM = """\
[gMASK]<sop>
{%- if tools %}{{ '<|system|>\n' + tools | tojson }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else -%}
{{ '<|' + m.role + '|>\n' + m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '\n<tool_call>' + c.function.name + c.function.arguments | tojson + '</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif -%}
"""

# Tool results are looked up in the calls before them: without calls, or without their ids, it
# refuses.
STRICT_CALLS = """\
{{- bos_token }}
{%- set ns = namespace(calls=[]) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set ns.calls = m.tool_calls or [] -%}
{{ '[ASSISTANT]' + m.content }}
{%- for c in ns.calls -%}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{{ '[CALL]' + c.function.name + c.function.arguments }}
{%- endfor -%}
{{ eos_token }}
{%- elif m.role == 'tool' -%}
{%- set found = ns.calls | selectattr('id', 'equalto', m.tool_call_id) | list -%}
{%- if not found %}{{ raise_exception('a tool result needs its call') }}{% endif -%}
{{ '[RESULT]' + found[0].function.name + ': ' + m.content + '[/RESULT]' }}
{%- else %}{{ '[' + m.role | upper + ']' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif -%}
"""

# Neither system messages nor tool results, and roles must alternate.
TURNS_ONLY = """\
{{- bos_token }}
{%- for m in messages -%}
{%- if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
{{ '<|turn>' + m.role + '\n' + m.content | trim + '<turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>assistant\n' }}{% endif -%}
"""

# A training template: turns without reasoning show an empty block, and the last turn shows the next
# header.
EMPTY_BLOCK = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|assistant|>' }}{% if '<think>' not in m.content %}{{ '<think></think>' }}{% endif %}{{ m.content }}
{%- if loop.last %}{{ '<|user|>' }}{% endif -%}
{%- else %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""

# Not prefix-stable: the first line counts the messages.
COUNTING = (
    "{{ '<|im_start|>system\n' + messages | length | string + ' messages<|im_end|>\n' }}" + QWEN25
)
# Not usable: what follows a turn says which message it is.
NUMBERED = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + ' ' + loop.index | string + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' + (messages | length + 1) | string + '\n' }}{% endif -%}
"""
DEAF = """\
{%- for m in messages if m.role != 'tool' -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
NO_CONTROL = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}
"""

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SHAPES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "qwen25": (QWEN25, _CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "pad_is_eos": (QWEN25, _CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}),
    "other_eos": (QWEN25, _CHATML, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "qwen3": (QWEN3, _CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3_thinking": (
        QWEN3_THINKING,
        _CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "llama3": (
        LLAMA3,
        (
            "<|begin|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|end|>",
            "<|python_tag|>",
        ),
        {"bos_token": "<|begin|>", "eos_token": "<|end|>"},
    ),
    "glm": (
        GLM,
        (
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|endoftext|>",
        ),
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    "strict_calls": (
        STRICT_CALLS,
        ("<s>", "</s>", "[SYSTEM]", "[USER]", "[ASSISTANT]", "[CALL]", "[RESULT]", "[/RESULT]"),
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "turns_only": (
        TURNS_ONLY,
        ("<s>", "<|turn>", "<turn|>"),
        {"bos_token": "<s>", "eos_token": "<turn|>"},
    ),
    "empty_block": (
        EMPTY_BLOCK,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        {"eos_token": "<|endoftext|>"},
    ),
    "counting": (COUNTING, _CHATML, {"eos_token": "<|im_end|>"}),
    "numbered": (NUMBERED, _CHATML, {"eos_token": "<|im_end|>"}),
    "deaf": (DEAF, _CHATML, {"eos_token": "<|im_end|>"}),
    "no_control": (NO_CONTROL, _CHATML, {"eos_token": "<|im_end|>"}),
}
APPENDING = ("qwen25", "pad_is_eos", "other_eos", "llama3", "glm", "strict_calls", "empty_block")
REWRITING = ("qwen3", "qwen3_thinking")


def build(template: str | None, special: Sequence[str], roles: dict[str, str]) -> Any:
    """A PreTrainedTokenizerFast with the byte alphabet, a few merges, and `<tool_call>` as an
    ordinary added token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 120,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS * 4, trainer)
    bpe.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        additional_special_tokens=[text for text in special if text not in roles.values()],
        **roles,
    )
    tokenizer.chat_template = template
    return tokenizer


@lru_cache
def tiny(shape: str) -> Any:
    """The tokenizer of one shape; its name is the shape's."""
    template, special, roles = _SHAPES[shape]
    tokenizer = build(template, special, roles)
    tokenizer.name_or_path = f"tiny-{shape}"
    return tokenizer


# What is said in the tests of chats.

TOOLS = [
    ToolSpec("search", "Find it.", {"type": "object", "properties": {"query": {"type": "string"}}})
]
CALL = ToolCall("search", {"query": "hello"})
ASK = Message.assistant("I will ask.", CALL)
RESULT = Message.tool("the answer is 42", CALL)
TASK = [Message.system("Be brief."), Message.user("What is it?")]
EPISODE = [
    *TASK,
    ASK,
    RESULT,
    Message.assistant("", CALL, CALL),
    RESULT,
    RESULT,
    Message.assistant("four"),
]
TALK = [*EPISODE, Message.user("Sure?"), Message.assistant("yes")]


def chat_of(shape: str, parser: str = "hermes", mode: str = "keep") -> Chat:
    return Chat(tiny(shape), parser, mode)


def text_of(chat: Chat, ids: Sequence[int]) -> str:
    return chat.tokenizer.decode(list(ids), skip_special_tokens=False)
