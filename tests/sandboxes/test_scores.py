"""The same work gets the same score on every real backend."""

from __future__ import annotations

import itertools

import pytest
from conftest import require
from helpers import call, rollouts, says

from agentrl.env import ToolEnv
from agentrl.envs.bugfix import FILE, BugFix
from agentrl.envs.code import Code
from agentrl.policies.base import Scripted, noop
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, Pool, SandboxLimits
from agentrl.verifiers.code.hidden_tests import hidden_tests

BACKENDS = {"bubblewrap": BubblewrapBackend, "docker": DockerBackend}
TASKS = 4
WRONG = {
    "returns nothing": "def {name}(*args, **kwargs):\n    return None\n",
    "is no Python": "def {name}(:\n",
    "leaves with success": "import os\nos._exit(0)\n",
    "raises": "def {name}(*args, **kwargs):\n    raise ValueError('wrong')\n",
    "eats memory": "def {name}(*args, **kwargs):\n    return bytearray(1 << 40)\n",
}


class Judged(Code):
    """code-v0 with a verifier without a cache, so that each backend judges for itself."""

    verifier = hidden_tests()


class Mended(BugFix):
    """bugfix-v0, likewise."""

    verifier = hidden_tests()


def wrong(text: str) -> Scripted:
    """Writes an answer of this kind in the place of each artifact."""

    def script(task):
        for path in task.artifacts:
            yield says(
                call(
                    "write_file",
                    path=path,
                    text=text.format(name=task.hidden.get("entry_point", "f")),
                )
            )
        yield says(call("submit"))

    return Scripted("wrong", script)


def broken(old: str, new: str) -> Scripted:
    """Edits the line that returns, looks at the tests, and submits."""

    def script(task):
        lines = task.files[FILE].splitlines()
        number, line = next((n, line) for n, line in enumerate(lines, 1) if "return" in line)
        yield says(call("edit", line=number, old=line, new=line.replace(old, new)))
        yield says(call("run_tests"))
        yield says(call("submit"))

    return Scripted("broken", script)


def outcomes(backend: str, make: type[ToolEnv], policy) -> dict[str, tuple]:
    """Task -> (ending, score, and how many calls failed)."""
    pool = Pool(BACKENDS[backend](), size=2, limits=SandboxLimits(memory_mb=256))
    with rollouts(make, policy, pool=pool) as playing:
        groups = playing.gather(list(itertools.islice(make().tasks("test", 0), TASKS)), 0)
    episodes = {group.episodes[0].task.id: group.episodes[0] for group in groups}
    return {
        name: (episode.end, episode.score.value, episode.score.parts, episode.counts.tool_errors)
        for name, episode in episodes.items()
    }


CASES = {
    "code: oracle": (Judged, Scripted("oracle", Judged().oracle_actions)),
    "code: noop": (Judged, noop()),
    **{f"code: {name}": (Judged, wrong(text)) for name, text in WRONG.items()},
    "bugfix: oracle": (Mended, Scripted("oracle", Mended().oracle_actions)),
    "bugfix: noop": (Mended, noop()),
    "bugfix: submits what was there": (
        Mended,
        Scripted("submit", lambda task: [says(call("submit"))]),
    ),
    "bugfix: wrong": (Mended, broken("return", "return not")),
    "bugfix: is no Python": (Mended, broken("return", ")(")),
}
FAST = ("oracle", "noop", "wrong", "returns nothing")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name.endswith(FAST) else pytest.mark.long) for name in CASES],
)
def test_scores_are_the_same_on_docker_as_on_bubblewrap(name):
    for backend in BACKENDS:
        require(backend)
    one, other = (outcomes(backend, *CASES[name]) for backend in BACKENDS)
    assert one == other
    assert len(one) == TASKS
    assert {score for _, score, *_ in one.values()} == {1.0 if name.endswith("oracle") else 0.0}
    assert not any(errors for *_, errors in one.values())
