"""Turns as tokens that the tokenizer itself would hardly ever give."""

from __future__ import annotations

from tiny_tokenizers import tiny

from agentrl.chat.tokens import Chat

CHAT = Chat(tiny("qwen25"))
STOP = next(iter(CHAT.stop_ids & {CHAT.tokenizer.convert_tokens_to_ids("<|im_end|>")}))
CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "hello"}}\n</tool_call>'


def spelled(text: str) -> list[int]:
    """Ids of the text, one token per byte: hardly ever what the tokenizer itself would give."""
    ids = []
    for piece in (
        text.replace("<tool_call>", "\0<tool_call>\0")
        .replace("</tool_call>", "\0</tool_call>\0")
        .split("\0")
    ):
        if piece in ("<tool_call>", "</tool_call>"):
            ids.append(CHAT.tokenizer.convert_tokens_to_ids(piece))
        else:
            ids += [
                token
                for letter in piece
                for token in CHAT.tokenizer.encode(letter, add_special_tokens=False)
            ]
    return ids
