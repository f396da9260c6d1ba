"""A backend that goes away for a while costs the episodes that were in it, and no others."""

import time

import pytest
from helpers import Echo, rollouts, says, script, tasks_of

from agentrl.errors import BackendAway, SandboxLost
from agentrl.rollout import outage
from agentrl.sandboxes import Pool, open_pool
from agentrl.types import EndReason

pytestmark = pytest.mark.usefixtures("nothing_is_left")
YES = says(content="yes")


class Boxed(Echo):
    needs_sandbox = True
    artifacts = ("out.txt",)


class Flickering:
    """A real backend that is away for a while after its first sandboxes."""

    name, is_boundary = "flickering", True

    def __init__(self, good, away_s):
        self._inner = open_pool("trusted-process", size=1).backend
        self._good, self._away_s = good, away_s
        self._since = None

    async def open(self, role, limits):
        self._good -= 1
        if self._good < 0:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since < self._away_s:
                raise SandboxLost("the daemon does not answer")
        return await self._inner.open(role, limits)


class Fresh(Boxed):
    isolation = "fresh"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(outage, "BACK_OFF_S", (0.1, 0.2, 0.4, 0.8))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backend_that_is_away_for_a_while_is_waited_for(quick, capsys, deterministic):
    pool = Pool(Flickering(3, 0.5), size=2, trust=True)
    options = {"concurrency": 2, "retries": 1, "deterministic": deterministic}
    with rollouts(Fresh, script(YES), pool=pool, **options) as playing:
        groups = playing.gather(tasks_of(12), 0)
    assert [group.rewards_G for group in groups] == [(1.0,)] * 12
    told = capsys.readouterr().err
    assert told.count("no sandbox can be had, playing waits: the daemon does not answer") >= 1
    assert "is there again" in told and len(told.splitlines()) < 12


def test_a_backend_that_stays_away_ends_the_run_and_burns_nothing(quick):
    seen = []
    pool = Pool(Flickering(3, 1e9), size=2, trust=True)
    with (
        rollouts(Fresh, script(YES), pool=pool, concurrency=2, on_episode=seen.append) as playing,
        pytest.raises(BackendAway, match=r"no sandbox could be had for 1\.5 s"),
    ):
        playing.gather(tasks_of(50), 0)
    assert sum(episode.end is EndReason.SANDBOX_LOST for episode in seen) <= 4


def test_a_backend_that_never_was_there_is_not_waited_for():
    began = time.monotonic()
    with rollouts(Fresh, script(YES), pool=Pool(Flickering(0, 1e9), size=1, trust=True)) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    assert group.episodes[0].end is EndReason.SANDBOX_LOST
    assert time.monotonic() - began < sum(outage.BACK_OFF_S) / 2
