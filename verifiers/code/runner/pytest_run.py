"""Runs hidden tests by the pytest of the grader's image, in the candidate's process: for fixtures
and a conftest.py.

Nothing is believed because pytest says it: it shares the process with the candidate, as our own
    runner does. It finds
the hidden files alone, in a folder of their own, with no configuration, cache or plugin but a
conftest.py among them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no")


class _Reports:
    """What pytest reports: a test with parameters is one test, which has passed if it did with each
    of them.
    """

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test: set-up, call or tear-down."""
        name = report.nodeid.partition("[")[0]
        if report.outcome != "passed" or hasattr(report, "wasxfail"):
            self.failed.add(name)
        elif report.when == "call":
            self.called.add(name)


def run(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Run every test of the files; yields (id, "p" or "f"), with the ids of `hidden.Tests`."""
    import tempfile

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    folder = tempfile.mkdtemp()
    for name, text in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    with open(os.path.join(folder, "empty.ini"), "w") as file:
        file.write("[pytest]\n")
    import pytest

    reports, sys.dont_write_bytecode = _Reports(), True
    places = (
        "-c",
        os.path.join(folder, "empty.ini"),
        "--rootdir",
        folder,
        "--confcutdir",
        folder,
        folder,
    )
    pytest.main([*_OPTIONS, *places], plugins=[reports])
    for name in reports.called | reports.failed:
        yield name, "f" if name in reports.failed else "p"
