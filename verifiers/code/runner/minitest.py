"""Runs pytest-style test functions, in the judge's process or in the candidate's.

Offered are plain functions and methods `test_*`, unittest.TestCase with its set-up, coroutines, and
of pytest `raises`, `approx`, `mark.parametrize` and `skip` (a skipped test has not passed). What
wants more goes to `pytest_run`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any


class Watch:
    """What is told of each test, and can spoil it; this one spoils none."""

    spoiled = ""

    def begin(self, test: str) -> None:
        """A test begins."""


class Skipped(BaseException):
    """Raised by pytest.skip: the test has not passed."""


class raises:
    """Context manager that wants an exception of the given type, whose text `match` finds."""

    def __init__(self, expected: Any, *, match: str | None = None) -> None:
        self.expected = expected
        self.match = match
        self.value: Any = None

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"{self.expected} was not raised")
        value = getattr(value, "error", value) if kind.__name__ == "Escaped" else value
        if not isinstance(value, self.expected):
            return False
        if self.match is not None:
            import re

            assert re.search(self.match, str(value)), f"{value} does not match {self.match!r}"
        self.value = value
        return True


class approx:
    """Numbers, alone or in a sequence or dict, up to a tolerance; NaN is near nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected = expected
        self.tolerances = (rel, abs)

    def __eq__(self, other: object) -> bool:
        return self._near(other, self.expected)

    def _near(self, got: Any, want: Any) -> bool:
        if isinstance(want, dict):
            return (
                isinstance(got, dict)
                and got.keys() == want.keys()
                and all(self._near(got[k], want[k]) for k in want)
            )
        if isinstance(want, list | tuple):
            return len(got) == len(want) and all(
                self._near(a, b) for a, b in zip(got, want, strict=True)
            )
        if not isinstance(want, int | float) or isinstance(want, bool):
            return bool(got == want)
        rel, least = self.tolerances
        return bool(got == want or abs(got - want) <= max(rel * abs(want), least) < float("inf"))


class _Mark:
    """`pytest.mark`: parametrize is carried out, skip and xfail keep a test from passing."""

    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **kwargs: Any) -> Any:
            def decorate(test: Any) -> Any:
                test.marks = [*getattr(test, "marks", []), (name, args)]
                return test

            bare = len(args) == 1 and callable(args[0]) and not kwargs
            return decorate(args[0]) if bare else decorate

        return mark


def skip(reason: str = "") -> None:
    """Give up on a test."""
    raise Skipped(reason)


def fail(reason: str = "") -> None:
    """Fail a test."""
    raise AssertionError(reason)


def run(files: dict[str, str], watch: Watch) -> Iterator[tuple[str, str]]:
    """Run every test of the files; yields (id, "p" or "f"), with the ids of `hidden.Tests`."""
    stand_in: Any = type(sys)("pytest")
    stand_in.raises, stand_in.approx, stand_in.mark, stand_in.skip, stand_in.fail = (
        raises,
        approx,
        _Mark(),
        skip,
        fail,
    )
    sys.modules["pytest"] = stand_in
    for file, text in files.items():
        module = type(sys)(file.removesuffix(".py").replace("/", "."))
        exec(compile(text, file, "exec"), module.__dict__)
        for name, test in _collect(module):
            watch.begin(f"{file}::{name}")
            outcome = _outcome(test)
            yield f"{file}::{name}", "f" if watch.spoiled else outcome


def _collect(module: ModuleType) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, item in list(vars(module).items()):
        if getattr(item, "__module__", None) != module.__name__:
            continue
        if isinstance(item, type):
            for method in [key for key in vars(item) if key.startswith("test_")]:
                yield f"{name}::{method}", _in_class(item, method)
        elif name.startswith("test_") and callable(item):
            yield name, _all_parameters(item)


def _in_class(kind: Any, method: str) -> Callable[[], None]:
    def test() -> None:
        is_case = any(base.__name__ == "TestCase" for base in kind.__mro__)
        instance = kind(method) if is_case else kind()
        if is_case:
            instance.debug()
            return
        getattr(instance, "setup_method", lambda: None)()
        _all_parameters(getattr(instance, method))()
        getattr(instance, "teardown_method", lambda: None)()

    return test


def _all_parameters(test: Any) -> Callable[[], None]:
    def run_all() -> None:
        rows: list[dict[str, Any]] = [{}]
        for name, args in getattr(test, "marks", []):
            if name in ("skip", "xfail", "skipif"):
                raise Skipped(name)
            if name == "parametrize":
                names = (
                    [part.strip() for part in args[0].split(",")]
                    if isinstance(args[0], str)
                    else list(args[0])
                )
                values = [value if len(names) > 1 else (value,) for value in args[1]]
                rows = [
                    row | dict(zip(names, value, strict=True)) for row in rows for value in values
                ]
        assert rows, "no parameters"
        for row in rows:
            _finish(test(**row))

    return run_all


def _finish(result: Any) -> None:
    if hasattr(result, "__await__"):
        import asyncio

        asyncio.run(result)


def _outcome(test: Callable[[], None]) -> str:
    try:
        test()
    except BaseException:  # noqa: BLE001  a test passes by returning, and in no other way
        return "f"
    return "p"
