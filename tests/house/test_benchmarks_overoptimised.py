"""Each arm of the over-optimisation experiment asks the proxy that its name says."""

import asyncio

import pytest

from agentrl.types import EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission
from benchmarks.experiments import overoptimised
from benchmarks.experiments.overoptimised import ARMS, MODELS, Requests, environment

MADE = {name: name for name in ("one", "ensemble", *(f"one{at}" for at in range(1, MODELS)))}
VALUES = {"one": 0.5, "ensemble": 0.4} | {f"one{at}": 0.5 + at / 10 for at in range(1, MODELS)}


@pytest.fixture
def asked(monkeypatch):
    """What was loaded: folder -> options."""
    found = {}

    def load(folder, **options):
        found[folder] = options

        async def verify(submission):
            return Score(VALUES[folder])

        return verify

    monkeypatch.setattr(overoptimised, "load_proxy", load)
    return found


@pytest.mark.parametrize(
    ("arm", "value"),
    [
        ("one head", 0.5),
        ("ensemble, mean - 3 std", 0.4),
        ("ensemble, min", 0.4),
        ("five models, mean - 3 std", 0.7 - 3 * 0.02**0.5),
        ("five models, min", 0.5),
        ("one head, KL penalty", 0.5),
    ],
)
def test_an_arm_asks_what_its_name_says(arm, value, asked):
    env = Requests(**environment(MADE, ARMS[arm]))
    task = Task(id="a", instruction="x", metadata={"split": "train"})
    said = Submission(
        task=task, messages=(Message.assistant("yes please"),), end=EndReason.ANSWERED
    )
    assert asyncio.run(env.verifier(said)).value == pytest.approx(value)
    combine = {"ensemble, mean - 3 std": "pessimistic", "ensemble, min": "min"}.get(arm)
    assert [options.get("combine") for options in asked.values()] == [combine] * len(asked)
    assert len(asked) == (MODELS if arm.startswith("five") else 1)


def test_every_arm_is_tried():
    assert len(ARMS) == 6
