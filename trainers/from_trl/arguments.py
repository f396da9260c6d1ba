"""What is read of a GRPOConfig, and what is found out about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args, get_type_hints

import tomli_w

from agentrl.errors import ConfigError
from agentrl.trainers.peers import TRL


@dataclass
class Translation:
    """What became of a GRPOConfig.

    Attributes:
        settings: rows of a config file, by name; `env` and `model` are not among them unless told.
        differs: sentences on settings that mean something else here.
        unmatched: sentences on settings that have no match.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def toml(self, source: str) -> str:
        """A config file, with the sentences as comments at its head."""
        lines = [f"Translated from {source}, a trl.GRPOConfig."]
        lines += ["", "Differs in meaning:", *(f"- {one}" for one in self.differs)]
        lines += ["", "Has no match here:", *(f"- {one}" for one in self.unmatched or ["nothing"])]
        missing = [name for name in ("env", "model") if name not in self.settings]
        if missing:
            lines += ["", f"A GRPOConfig does not say: add a line for {' and for '.join(missing)}."]
        head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        return f"{head}\n{tomli_w.dumps(self.settings)}"


class Arguments:
    """Settings of TRL, which know what was read of them.

    Attributes:
        defaults: name -> values that are TRL's own: before and after it fills in what is None.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        from trl import GRPOConfig

        plain = GRPOConfig(output_dir="trl", use_cpu=True, bf16=False).to_dict()
        self.defaults = {
            one.name: (one.default, plain.get(one.name)) for one in dataclasses.fields(GRPOConfig)
        }
        unset = dict.fromkeys(("output_dir", "generation_batch_size", "steps_per_generation"))
        self._plain = plain | unset | {"use_cpu": False, "bf16": True}
        self._row, self._read = dict(row), set[str]()
        bools = {"scale_rewards": bool | str}  # True and False are read as "group" and "none"
        self._types = get_type_hints(GRPOConfig) | bools

    def __getitem__(self, name: str) -> Any:
        """The value, which counts as read.

        Raises:
            ConfigError: it is of a type that TRL does not take.
        """
        self._read.add(name)
        value = self._row.get(name, self._plain[name])
        if self.says(name) and not _is_of(self._types[name], value):
            raise ConfigError(
                f"{name}={value!r} of the GRPOConfig must be {_worded(self._types[name])}: write it"
                " as GRPOConfig(...).to_json_string() does"
            )
        return value

    def says(self, name: str) -> bool:
        """Whether a setting is not at its default."""
        return name in self._row and self._row[name] not in self.defaults.get(name, ())

    def shown(self, name: str) -> str:
        """Name and value; the value then counts as read."""
        return f"{name}={self[name]!r}"

    def rest(self) -> list[str]:
        """What was not read and is not at its default."""
        return [
            f"{name}={value!r}: {self._why(name)}"
            for name, value in self._row.items()
            if name not in self._read and self.says(name)
        ]

    def _why(self, name: str) -> str:
        if name not in self.defaults:
            return "no setting of this version of TRL"
        return f"the nearest here is {TRL[name]}" if name in TRL else "nothing here does that"


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of a type, as settings of TRL have them; words of an enum are str."""
    if kinds := get_args(kind):
        return any(_is_of(one, value) for one in kinds)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _worded(kind: Any) -> str:
    """A type in words."""
    kinds = [one for one in get_args(kind) or (kind,) if not issubclass(one, Enum)]
    return " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
