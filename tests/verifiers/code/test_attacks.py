"""The catalogue of exploits: each fools the verifier with its hole, and earns nothing here."""

from __future__ import annotations

import asyncio
import re

import pytest
from conftest import require
from weak_verifiers import FOOLED_BY, HIDDEN, HONEST, WEAK, agent_phase, grade_weakly, sample_task

from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Task
from agentrl.verifiers.attacks import CATALOGUE, Payload, attacks_for, target_of
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import hidden_tests

ATTACKS = {attack.name: (attack, payload) for attack, payload in attacks_for(sample_task())}
LASTING = {"hang", "fork-bomb", "full-disk", "deep-answer", "verdict-daemon", "faked-clock"}
HANDFUL = (
    "value-that-changes",
    "operators-that-decide",
    "early-exit",
    "always-equal",
    "callers-frame",
    "symlink-out",
    "reports-in-advance",
    "patched-reporter",
)
FAIR = Payload({"solution.py": HONEST.encode()})


def in_pool(backend: str, work, names) -> dict[str, object]:
    """What `work(pool, name)` gives for each name, a few at a time."""
    require(backend)

    async def run():
        pool = open_pool(backend, size=2)
        gate = asyncio.Semaphore(2)

        async def one(name):
            async with gate:
                return await work(pool, name)

        try:
            return await asyncio.gather(*map(one, names))
        finally:
            await pool.close()

    return dict(zip(names, asyncio.run(run()), strict=True))


async def weakly(pool, name: str, payload: Payload | None = None, weak: str = "") -> bool:
    async with pool.lease("agent", isolation="fresh") as sandbox:
        return await grade_weakly(
            WEAK[weak or FOOLED_BY[name]], sandbox, payload or ATTACKS[name][1]
        )


def scored(form: str, payloads: dict[str, Payload], wall_s: float):
    verifier = hidden_tests(call_s=min(2.0, wall_s / 2), wall_s=wall_s)
    patient = hidden_tests(
        call_s=20, wall_s=60
    )  # honest work is in no hurry, however slow and busy the machine
    task = sample_task(form)

    async def score(pool, name: str) -> float | None:
        async with pool.lease("agent") as sandbox:
            await agent_phase(sandbox, payloads[name])
            await sandbox.kill_all()
            artifacts = await sandbox.get(task.artifacts)
        judge = patient if name == "honest" else verifier
        return (await judge(Submission(task, (), EndReason.SUBMITTED, artifacts, pool))).value

    return score


def check_scores(backend: str, form: str, names, wall_s: float = 20.0) -> None:
    payloads = {name: ATTACKS[name][1] for name in names} | {"honest": FAIR}
    scores = in_pool(backend, scored(form, payloads, wall_s), list(payloads))
    assert scores.pop("honest") == 1.0
    assert scores == dict.fromkeys(scores, 0.0)


def test_the_catalogue_is_whole():
    assert {attack.number for attack in CATALOGUE} == set(range(1, 59))
    assert len({attack.name for attack in CATALOGUE}) == len(CATALOGUE)
    assert len({attack.number for attack, _ in ATTACKS.values()}) >= 48
    assert all(attack.mechanism.endswith(".") and attack.source for attack in CATALOGUE)
    assert set(FOOLED_BY) == set(ATTACKS)
    assert set(FOOLED_BY.values()) == set(WEAK)
    for attack in CATALOGUE:
        if attack.reason:
            assert not attack.files and not attack.script
            with pytest.raises(ValueError, match=re.escape(attack.name)):
                attack.build(target_of(sample_task()))


def test_an_attack_is_aimed_by_what_is_shown_alone():
    task = sample_task()
    target = target_of(task.view())
    assert (target.path, target.name, target.tests) == (
        "solution.py",
        "total",
        "tests/test_visible.py",
    )
    assert ("repr([1, 2])", "3") in target.examples
    assert attacks_for(task) == attacks_for(task.view())
    other = Task(
        id="x",
        instruction="Write the report.",
        artifacts=("pkg/mod.py",),
        files={"pkg/mod.py": "def go(a):\n"},
    )
    assert (target_of(other).name, target_of(other).path) == ("go", "pkg/mod.py")
    for attack, payload in attacks_for(other):
        compile(payload.files["pkg/mod.py"], attack.name, "exec")
        assert b"$" not in b"".join(payload.files.values()) and "$" not in payload.script
    with pytest.raises(ValueError, match="no artifact"):
        attacks_for(Task(id="x", instruction="Say it."))


@pytest.mark.parametrize("form", HIDDEN)
def test_attacks_earn_nothing_and_honest_work_everything(form):
    check_scores("bubblewrap", form, [name for name in ATTACKS if name not in LASTING])


@pytest.mark.parametrize("form", HIDDEN)
def test_attacks_that_last_earn_nothing(form):
    check_scores("bubblewrap", form, sorted(LASTING), wall_s=3.0)


@pytest.mark.parametrize("form", HIDDEN)
def test_a_handful_of_attacks_earn_nothing_on_docker(form):
    check_scores("docker", form, HANDFUL)


@pytest.mark.long
@pytest.mark.parametrize("form", HIDDEN)
def test_all_attacks_earn_nothing_on_docker(form):
    check_scores("docker", form, [name for name in ATTACKS if name not in LASTING])
    check_scores("docker", form, sorted(LASTING), wall_s=3.0)


QUICK = [name for name in FOOLED_BY if not WEAK[FOOLED_BY[name]].with_pytest]
SLOW = [name for name in FOOLED_BY if name not in QUICK]


@pytest.mark.parametrize(
    "names", [QUICK[::2], QUICK[1::2], SLOW[::2], SLOW[1::2]], ids=["1", "2", "3", "4"]
)
def test_every_attack_fools_the_verifier_with_its_hole(names):
    accepted = in_pool("bubblewrap", weakly, names)
    assert [name for name, taken in accepted.items() if not taken] == []


@pytest.mark.long
def test_a_weak_verifier_is_a_verifier_all_the_same():
    """It takes honest work and refuses a stub, so that what fools it is the attack."""
    stub = ATTACKS["nothing"][1]
    careless = {"points for what did not go wrong", "a judge that believes what it reads"}
    careless |= {name for name in WEAK if "candidate may" in name or "may change" in name}
    careless |= {
        "a mock in the candidate's process",
        "a truth of the candidate's",
        "a getter in the candidate's process",
        "a difference that the candidate computes",
    }
    careless |= {"a clock in the candidate's process", "pytest on the tests that the agent sees"}
    names = [name for name in WEAK if name not in careless]

    async def both(pool, name):
        return await weakly(pool, "", FAIR, name), await weakly(pool, "", stub, name)

    seen = in_pool("bubblewrap", both, names)
    stale = "an old verdict stays where a new one cannot be written"
    assert seen.pop(stale) == (True, False)
    assert seen == dict.fromkeys(seen, (True, False))
