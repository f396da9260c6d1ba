"""A tiny model of the ordinary kind, made on the spot: Qwen3 shape, a BPE tokenizer, a chat
template, a plain folder.

For demonstrations, tests and benchmarks on a machine without a model hub. Everything that loads it
is the real loading code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.chat.rows import SHOWS_NO_TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = (
    SHOWS_NO_TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set made = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + made | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
)
"""Names no tools: a tiny model learns them by demonstration, and schemas would fill its context."""


_SCAFFOLD = r'\n?\{"name": "[a-z_]+", "arguments": \{(?:"[a-z_]+": "?)?|"?, "[a-z_]+": "?|"?\}\}\n?'
_WORDS = r"[a-z]+(?:[_.][a-z]+)+| ?[A-Za-z]+| ?\d|\n?(?: {4})+| +|//|[<>=!]=|[^\sA-Za-z\d]|\s"


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 320, alphabet: Iterable[str] | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that keeps words and the scaffold of a tool call whole, and
    digits single.

    Args:
        texts: what the tokens are learnt from, chat markers included.
        vocab_size: special tokens and alphabet included.
        alphabet: characters that always have a token; default all 256 bytes. With fewer,
            other characters are dropped and never sampled.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Split(Regex(f"{_SCAFFOLD}|{_WORDS}"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    always = (
        None
        if alphabet is None
        else [as_bytes.pre_tokenize_str(letter)[0][0] for letter in alphabet]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if always is None else always,
        show_progress=False,
    )
    plain = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in plain.split(text) if piece), trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(
    folder: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = 128,
    layers: int = 2,
    context: int = 1024,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised Qwen3 model with its tokenizer as a Hugging Face folder and
    return the folder.

    Weights start at a standard deviation of 0.06, not 0.02: at this width that halves the steps of
        a warm start.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
