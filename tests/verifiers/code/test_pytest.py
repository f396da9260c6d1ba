"""Hidden tests that only pytest can run: fixtures, a conftest.py, files of their own."""

from __future__ import annotations

import asyncio

import pytest
from conftest import require

from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Task
from agentrl.verifiers.attacks import attacks_for
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.admission import admit
from agentrl.verifiers.code.hidden import read_hidden
from agentrl.verifiers.code.hidden_tests import hidden_tests

STORE = """\
class Store:
    def __init__(self, path):
        self.path = path

    def add(self, name, count=1):
        found = self.read()
        found[name] = found.get(name, 0) + count
        self.path.write_text("\\n".join(f"{key} {value}" for key, value in found.items()))

    def read(self):
        if not self.path.exists():
            return {}
        rows = [line.split() for line in self.path.read_text().splitlines()]
        return {name: int(count) for name, count in rows}
"""
FILES = {
    "conftest.py": (
        """\
import pytest
from shop.store import Store

@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "stock")
"""
    ),
    "test_store.py": (
        """\
import pytest

def test_empty(store):
    assert store.read() == {}
    assert len(store.read()) == 0

@pytest.mark.parametrize(("names", "want"), [("ab", {"a": 1, "b": 1}), ("aa", {"a": 2})])
def test_counts(store, names, want):
    for name in names:
        store.add(name)
    assert store.read() == want

class TestMany:
    def test_at_once(self, store):
        store.add("nail", 40)
        store.add("nail", 2)
        assert store.read()["nail"] == 42
"""
    ),
    "deep/test_kept.py": (
        """\
from shop.store import Store

def test_kept(tmp_path):
    Store(tmp_path / "s").add("x", 3)
    assert Store(tmp_path / "s").read() == {"x": 3}
"""
    ),
}
TASK = Task(
    id="store",
    instruction="Mend the store.",
    hidden={"tests": FILES},
    oracle={"files": {"shop/store.py": STORE}},
)
WRONG = STORE.replace("found.get(name, 0) + count", "count")
SKIPS = "import pytest\n" + STORE + "\npytest.skip('later', allow_module_level=True)\n"
LEAVES = STORE + "\nimport os\nos._exit(0)\n"
PATCHES = (
    WRONG
    + """
from _pytest.runner import CallInfo
real = CallInfo.from_call.__func__
def forged(cls, func, when, reraise=None):
    if when == "collect":
        return real(cls, func, when, reraise)
    return cls(None, None, 0.0, 0.0, 0.0, when, _ispytest=True)
CallInfo.from_call = classmethod(forged)
"""
)


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.long)])
def backend(request):
    require(request.param)
    return request.param


def judge(backend: str, task: Task, *codes: str):
    async def run():
        pool = open_pool(backend, size=2)
        verifier = hidden_tests(call_s=10, wall_s=60)
        try:
            refused = await admit([task], verifier, pool)
            given = [{"shop/store.py": code.encode()} for code in codes]
            made = [Submission(task, (), EndReason.SUBMITTED, files, pool) for files in given]
            return refused, await asyncio.gather(*map(verifier, made))
        finally:
            await pool.close()

    return asyncio.run(run())


def test_who_needs_pytest_is_seen_from_the_text():
    def needs(text: str, name: str = "test_a.py") -> bool:
        files = {name: text, "test_z.py": "def test_z():\n    assert 1 == 1\n"}
        return read_hidden(TASK.model_copy(update={"hidden": {"tests": files}})).by_pytest

    assert read_hidden(TASK).by_pytest
    assert needs("def test_a(tmp_path):\n    assert tmp_path\n")
    assert needs("import pytest\n@pytest.fixture(autouse=True)\ndef at():\n    pass\n")
    assert needs("X = 1\n", "conftest.py") and needs("X = 1\n", "deep/conftest.py")
    assert not needs(
        "import pytest\n@pytest.mark.parametrize('a, b', [(1, 1)])\ndef test_a(a, b):\n    assert a"
        " == b\n"
    )
    assert not needs("class TestA:\n    def test_a(self):\n        assert 1 == 1\n")


def test_honest_work_passes_and_no_forger_does(backend):
    refused, scores = judge(backend, TASK, STORE, WRONG, SKIPS, LEAVES, PATCHES)
    assert refused == {}
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert "4 of 4 hidden tests passed" in scores[0].why
    assert {score.parts["isolated"] for score in scores} == {1.0}


@pytest.mark.long
def test_the_catalogue_earns_nothing(bubblewrap):
    payloads = [
        payload.files["shop/store.py"].decode()
        for attack, payload in attacks_for(TASK)
        if attack.number <= 16
    ]
    refused, scores = judge("bubblewrap", TASK, *payloads)
    assert refused == {} and len(payloads) >= 14
    assert {score.value for score in scores} == {0.0}


def test_a_grader_without_pytest_is_a_broken_grader(bubblewrap, monkeypatch):
    from agentrl.verifiers.code import hidden_tests as judging

    packet = judging._runner_packet.__wrapped__

    def elsewhere(form: str) -> bytes:
        return packet(form).replace(
            b"/usr/lib/python3/dist-packages", b"/usr/lib/python3/none-packages"
        )

    monkeypatch.setattr(judging, "_runner_packet", elsewhere)
    refused, _ = judge("bubblewrap", TASK)
    assert "fixtures or a conftest.py need pytest" in refused["store"]
