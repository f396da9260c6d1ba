"""The chat templates that TRL ships, each with a tiny tokenizer that has its control tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiny_tokenizers import build

VISION = ("idefics3", "llava_next", "smolvlm")


def _folder() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


def trl_names() -> list[str]:
    """All but copies for training and those that are made for pictures."""
    names = (path.stem for path in sorted(_folder().glob("*.jinja")))
    return [
        name for name in names if not name.endswith(("_training", "_vl")) and name not in VISION
    ]


_CONTROL = re.compile(
    r"<\|[\w\"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
)
_FURTHER = {"lfm2": ("<|tool_call_start|>", "<|tool_call_end|>")}


def trl_template(name: str) -> str:
    return (_folder() / f"{name}.jinja").read_text()


@lru_cache
def trl_tokenizer(name: str) -> Any:
    template = trl_template(name)
    control = {*_CONTROL.findall(template), *_FURTHER.get(name, ())}
    special = ["<bos>", "<eos>", *sorted(control)]
    tokenizer = build(template, special, {"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.name_or_path = name
    return tokenizer
