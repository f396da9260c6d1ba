"""What branches cost: tokens per episode of calc-v0 under chat templates that rewrite history.

    python -m benchmarks.experiments.branches TEMPLATE.jinja...

The oracle's episodes, with a sentence of reasoning before every turn, are laid out as online play
would record them. Tokens are counted by a byte-level tokenizer that has each template's control
tokens, so they compare templates with each other, not with a model's own tokenizer.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.chat.tokens import Chat
from agentrl.registry import factory
from agentrl.types import Message

EPISODES = 16
REASONING = "First the product, since it binds tighter, and then the sum of both."
_CONTROL = re.compile(
    r"<\|[\w\"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
)


def tokenizer_of(template: str) -> Any:
    """A tokenizer of single bytes with a template and its control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = ["<bos>", "<eos>", *sorted(set(_CONTROL.findall(template)))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*control, *alphabet])}
    bare = Tokenizer(models.BPE(vocab, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=control[2:],
    )
    tokenizer.chat_template = template
    return tokenizer


def conversations(operations: int) -> Iterator[list[Message]]:
    """The oracle's episodes, with reasoning."""
    env = factory("calc-v0", operations=operations)()
    for task in itertools.islice(env.tasks("train", 0), EPISODES):
        messages = [Message.system(env.system), Message.user(task.instruction)]
        for action in env.oracle_actions(task):
            messages.append(replace(action, reasoning=REASONING))
            messages += [Message.tool("1234", call) for call in action.tool_calls]
        yield messages


def main(paths: Sequence[str]) -> None:
    """Print one line for each template and number of operations."""
    print("template turns branches trained prompt+observed x_of_one_branch")
    for path in paths:
        chat = Chat(tokenizer_of(Path(path).read_text()))
        for operations in (2, 4):
            env = factory("calc-v0", operations=operations)()
            talks = list(conversations(operations))
            rows = [row for talk in talks for row in chat.render_demonstrations(talk, env.tools)]
            trained = sum(sum(row.mask) for row in rows)
            tokens = sum(len(row.mask) for row in rows)
            turns = sum(message.role == "assistant" for talk in talks for message in talk)
            longest = sum(
                max(len(row.mask) for row in chat.render_demonstrations(talk, env.tools))
                for talk in talks
            )
            print(
                Path(path).stem,
                f"{turns / EPISODES:.1f} {len(rows) / EPISODES:.1f} {trained / EPISODES:.0f}"
                f" {(tokens - trained) / EPISODES:.0f} {tokens / longest:.2f}",
            )


if __name__ == "__main__":
    main(sys.argv[1:])
