"""Python files of users, such as `path/env.py:Class`: load them, and carry them to other machines.

A file may import its neighbours: its folder is on `sys.path` while it loads. A spec keeps a copy
and a hash of the file and of the neighbours that it imported, so that another machine can run the
same code and nobody runs changed code by accident.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel, ConfigDict

from agentrl.errors import AgentRLError, ConfigError

_loading = threading.RLock()  # sys.path and sys.modules belong to the whole process
_neighbour_names: set[str] = set()


def load_file(path: Path, what: str) -> ModuleType:
    """Run a Python file that is in no package, and return its module.

    Args:
        path: the file.
        what: what it holds, for messages.

    Raises:
        ConfigError: there is no such file, or running it fails.
    """
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist: give path/to/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"agentrl_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with _neighbours_of(path.resolve().parent):
            spec.loader.exec_module(module)
    except AgentRLError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} file {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return module


@contextmanager
def _neighbours_of(folder: Path) -> Iterator[None]:
    """Let a file import modules from its own folder."""
    with _loading:
        # Two folders may both have a `helpers.py`; a module of the other one must not be reused.
        for name in _neighbour_names:
            sys.modules.pop(name, None)
        _neighbour_names.clear()
        before = set(sys.modules)
        importlib.invalidate_caches()
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            _neighbour_names.update(
                name for name in set(sys.modules) - before if _is_below(sys.modules[name], folder)
            )


def _is_below(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)


class UserFile(BaseModel):
    """A Python file of the user as it was when a run began."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Where the file was."""
    texts: dict[str, str]
    """File name, relative to the folder of `path`, -> text: the file itself comes first, then the
    neighbours that it imports."""
    sha256: str
    """Hash of `texts`."""

    @classmethod
    def read(cls, path: Path) -> UserFile:
        """Copy a file and the neighbours that it imports; this runs the file.

        Raises:
            ConfigError: there is no such file, or running it fails.
        """
        folder = path.resolve().parent
        with _loading:
            load_file(path, "Python")
            files = [sys.modules[name].__file__ for name in sorted(_neighbour_names)]
        neighbours = [Path(file).resolve() for file in files if file and file.endswith(".py")]
        texts = {
            str(file.relative_to(folder)): file.read_text()
            for file in (path.resolve(), *neighbours)
        }
        return cls(path=str(path), texts=texts, sha256=_hash(texts))

    def find_unchanged(self) -> Path | None:
        """The original file; None if it is not on this machine.

        Raises:
            ConfigError: the file, or a neighbour that it imports, has changed since.
        """
        path = Path(self.path)
        if not path.is_file():
            return None
        folder = path.resolve().parent
        files = {name: folder / name for name in self.texts}
        texts = {name: file.read_text() for name, file in files.items() if file.is_file()}
        if _hash(texts) != self.sha256:
            raise ConfigError(
                f"{path}, or a file that it imports, has changed since the run began (sha256"
                f" {self.sha256[:12]}): restore it, or name the environment to use instead",
                setting="env",
            )
        return path

    def locate(self) -> Path:
        """The original file, or the recorded copy where the original is not on this machine.

        Raises:
            ConfigError: the original has changed, or the copy does not match its hash.
        """
        original = self.find_unchanged()
        if original is not None:
            return original
        if _hash(self.texts) != self.sha256:
            raise ConfigError(
                f"the recorded copy of {self.path} does not match its hash {self.sha256[:12]}:"
                " restore the file it was copied from",
                setting="env",
            )
        return _unpack(self.sha256, json.dumps(self.texts))


def _hash(texts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """The folder of all unpacked copies; it goes when this process ends."""
    return tempfile.TemporaryDirectory(prefix="agentrl-files-")


@cache
def _unpack(sha256: str, texts: str) -> Path:
    folder = Path(_copies().name) / sha256[:16]
    files: dict[Path, str] = {folder / name: text for name, text in json.loads(texts).items()}
    for file, text in files.items():
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"the recorded copy {file.name!r} lies outside of its own folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return next(iter(files))
