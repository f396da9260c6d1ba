"""`agentrl new`: a working environment file and its test, to be changed from the first line on."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

from agentrl.errors import ConfigError

_ENVIRONMENT = '''"""{id}: count how often a letter stands in a word."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentrl import Limits, Task, ToolEnv, tool
from agentrl.verifiers import numeric

WORDS = ("banana", "letter", "mississippi", "parallel", "reward", "sandbox", "token", "verifier")


class {cls}(ToolEnv):
    """Count letters; the last number of the answer counts."""

    id = "{id}"
    system = "Look at the word with the tool, then answer with the number alone."
    verifier = numeric()
    limits = Limits(turns=4, tool_calls=8)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Every word with each letter of the alphabet's first (train) or second half (test)."""
        letters = "abcdefghijklm" if split == "train" else "nopqrstuvwxyz"
        rows = [(word, letter) for word in WORDS for letter in letters]
        random.Random(seed).shuffle(rows)
        for number, (word, letter) in enumerate(rows):
            count = word.count(letter)
            yield Task(
                id=f"{{word}}-{{letter}}",
                instruction=f"Word {{split}}-{{number}}: how often does {{letter!r}} stand in it?",
                metadata={{"word": word}},
                hidden={{"answer": count}},
                oracle={{"calls": [{{"name": "spell", "arguments": {{}}}}], "answer": str(count)}},
            )

    @tool
    def spell(self) -> str:
        """Show the word, one letter at a time."""
        return " ".join(self.task.metadata["word"])
'''

_TEST = '''"""The contract of {id}, checked rule by rule."""

from pathlib import Path

from agentrl.evaluation import check_environment
from agentrl.registry import factory

FILE = Path(__file__).with_name("{stem}.py")


def test_contract() -> None:
    findings = check_environment(factory(f"{{FILE}}:{cls}"))
    assert not [finding for finding in findings if finding.problem]
'''


def write_environment(name: str, folder: Path) -> tuple[Path, Path]:
    """Write `NAME.py` and `test_NAME.py` and return their paths.

    Raises:
        ConfigError: the name is no identifier, or a file is there already (nothing is overwritten).
    """
    stem = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", stem):
        raise ConfigError(
            f"environment name {name!r}: use lower-case letters, digits and dashes, as in"
            " word-count"
        )
    file, test = folder / f"{stem}.py", folder / f"test_{stem}.py"
    for path in (file, test):
        if path.exists():
            raise ConfigError(f"{path} exists already: choose another name or --out folder")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"id": f"{stem.replace('_', '-')}-v0", "cls": _class_name(stem), "stem": stem}
    file.write_text(_ENVIRONMENT.format(**values))
    test.write_text(_TEST.format(**values))
    return file, test


def try_it(file: Path, test: Path) -> list[str]:
    """Commands that try the two files of `write_environment`, also without an active `.venv`."""
    commands = {"agentrl": ["check", f"{file}:{_class_name(file.stem)}"], "pytest": [str(test)]}
    programs = {name: _program(name) for name in commands}
    return [shlex.join([program, *commands[name]]) for name, program in programs.items() if program]


def _program(name: str) -> str:
    """How to call a program that is installed beside this Python; empty where it is not."""
    here = shutil.which(name, path=str(Path(sys.executable).parent))
    if here is None:
        return ""
    return name if shutil.which(name) == here else here


def _class_name(stem: str) -> str:
    return "".join(part.capitalize() for part in stem.split("_"))
