"""Runs hidden tests by the pytest of the grader's image: for fixtures and a conftest.py.

The hidden files are modules in memory: no file of them lies on a disk that the candidate shares,
and pytest looks for no other, with no configuration, cache or plugin but their conftest.py.
"""

from __future__ import annotations

import importlib.machinery
import os
import pathlib
import sys

from agentrl.verifiers.code.runner import proxy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from agentrl.verifiers.code.runner.minitest import Watch

_ROOT = "/usr"
"""A folder that is there and that the candidate cannot write to; nothing in it is read."""
_OPTIONS: tuple[str, ...] = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "--capture=no",
)
_OPTIONS += ("--noconftest", "--tb=no", "-c", os.devnull, "--rootdir", _ROOT, "-p", "no:doctest")


class _Hidden:
    """Finds the hidden files by the last part of their name, as pytest does."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = {name.rpartition("/")[2].removesuffix(".py"): name for name in files}
        self.texts = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Where a module comes from; None if it is no hidden file."""
        if name not in self.files:
            return None
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """Modules are made as usual."""

    def exec_module(self, module: Any) -> None:
        """Run the text; lines of it are known by the name of the file."""
        file = self.files[module.__name__]
        module.__file__ = f"{_ROOT}/{file}"
        exec(compile(self.texts[file], file, "exec"), module.__dict__)


class _Plugin:
    """Collects the hidden files alone, and reports.

    A test with parameters is one test, which has passed if it did with each of them.
    """

    def __init__(self, files: dict[str, str], watch: Watch) -> None:
        self.files = files
        self.watch = watch
        self.called: set[str] = set()
        self.failed: set[str] = set()

    def pytest_collection(self, session: Any) -> bool:
        """Instead of a search of folders."""
        import pytest

        class File(pytest.Module):
            def _getobj(self) -> Any:
                return __import__(self.path.stem)

        config, session.items = session.config, []
        for name in sorted(self.files, key=lambda name: (name.count("/"), name)):
            path = pathlib.Path(_ROOT, name)
            if path.name == "conftest.py":
                sys.modules.pop("conftest", None)
                config.pluginmanager.register(__import__("conftest"), str(path))
        for name in self.files:
            path = pathlib.Path(_ROOT, name)
            if path.name != "conftest.py":
                session.items += session.genitems(File.from_parent(session, path=path))
        config.hook.pytest_collection_modifyitems(
            session=session, config=config, items=session.items
        )
        session.testscollected = len(session.items)
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.watch.begin(nodeid.partition("[")[0])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test: set-up, call or tear-down."""
        name = report.nodeid.partition("[")[0]
        if report.outcome != "passed" or hasattr(report, "wasxfail") or self.watch.spoiled:
            self.failed.add(name)
        elif report.when == "call":
            self.called.add(name)


def run(files: dict[str, str], watch: Watch) -> Iterator[tuple[str, str]]:
    """Run every test of the files; yields (id, "p" or "f"), with the ids of `hidden.Tests`."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.setdefault("PATH", os.defpath)
    import pytest

    sys.meta_path.insert(0, _Hidden(files))
    proxy.see_through(type(pytest.raises(Exception)))
    plugin, sys.dont_write_bytecode = _Plugin(files, watch), True
    pytest.main([*_OPTIONS], plugins=[plugin])
    for name in plugin.called | plugin.failed:
        yield name, "f" if name in plugin.failed else "p"
