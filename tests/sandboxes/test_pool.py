"""The pool lends clean sandboxes, never loses a slot, and ends what nobody may keep."""

from __future__ import annotations

import asyncio
import os

import pytest
from fake_sandboxes import FakeBackend

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes import Pool, open_pool
from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.pool import default_size


def run(body, pool_options=None, **options):
    async def main():
        backend = FakeBackend(**options)
        pool = Pool(backend, **{"size": 2, **(pool_options or {})})
        try:
            await body(pool, backend)
        finally:
            await pool.close()
        assert all(box.closed for box in backend.opened)

    asyncio.run(main())


async def until(condition):
    """Let the loop go on until the condition holds, or the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0.001)


def test_a_used_sandbox_is_reset_and_lent_again():
    async def body(pool, backend):
        for _ in range(3):
            async with pool.lease("agent") as box:
                pass
        assert backend.opened == [box.sandbox]
        assert box.sandbox.resets == 3
        assert (pool.counts.opened, pool.counts.reused, pool.counts.replaced) == (1, 2, 0)

    run(body)


def test_roles_never_share_a_sandbox_nor_a_bound():
    async def body(pool, backend):
        # The grader is lent though all agent slots are out.
        agents = (pool.lease("agent"), pool.lease("agent"))
        async with (
            asyncio.timeout(60),
            agents[0] as one,
            agents[1] as two,
            pool.lease("grader") as three,
        ):
            assert [box.sandbox.role for box in (one, two, three)] == ["agent", "agent", "grader"]

    run(body)


def test_later_leases_wait_for_a_free_slot():
    async def body(pool, backend):
        out = most = 0

        async def episode():
            nonlocal out, most
            async with pool.lease("agent"):
                out += 1
                most = max(most, out)
                await asyncio.sleep(0.001)
                out -= 1

        await asyncio.gather(*(episode() for _ in range(20)))
        assert most == 2
        assert len(backend.opened) == 2

    run(body)


def test_a_lost_sandbox_is_replaced():
    async def body(pool, backend):
        with pytest.raises(SandboxLost):
            async with pool.lease("agent") as box:
                box.sandbox.lost = True
                raise SandboxLost("gone")
        assert box.sandbox.closed
        async with pool.lease("agent") as fresh:
            pass
        fresh.sandbox.lost = True  # dies while idle
        async with pool.lease("agent") as third:
            assert third.sandbox not in (box.sandbox, fresh.sandbox)
        assert pool.counts.replaced == 2

    run(body)


def test_a_failed_open_frees_its_slot():
    async def body(pool, backend):
        backend.failing = True
        for _ in range(3):
            with pytest.raises(SandboxLost, match="not installed"):
                async with pool.lease("agent"):
                    pass
        backend.failing = False
        async with pool.lease("agent"), pool.lease("agent"):
            pass

    run(body)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.015, 0.025, 0.04])
def test_a_cancelled_lease_leaks_nothing(after_s):
    async def body(pool, backend):
        async def episode():
            async with pool.lease("agent") as box:
                box.sandbox.reset_s = 0.01
                await asyncio.sleep(0.01)

        tasks = [
            asyncio.ensure_future(episode()) for _ in range(5)
        ]  # some open, some wait, some work, some reset
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60), pool.lease("agent") as one, pool.lease("agent") as two:
            assert one.sandbox is not two.sandbox
        assert len(backend.opened) <= 2

    run(body, open_s=0.01)


def test_close_comes_twice_and_ends_what_is_lent():
    async def body(pool, backend):
        async with pool.lease("agent") as box:
            await pool.close()
            assert box.sandbox.closed
        await pool.close()
        with pytest.raises(SandboxLost, match="closed"):
            async with pool.lease("agent"):
                pass

    run(body)


def test_a_pool_moves_on_when_its_loop_is_closed():
    backend = FakeBackend()
    pool = Pool(backend, size=1)

    async def episode():
        async with pool.lease("agent") as box:
            return box.sandbox

    first, second = asyncio.run(episode()), asyncio.run(episode())
    assert first is not second
    assert first.closed
    asyncio.run(pool.close())
    assert second.closed


def test_two_living_loops_cannot_share_a_pool():
    pool = Pool(FakeBackend(), size=1)

    async def episode():
        async with pool.lease("agent"):
            pass

    async def main():
        await episode()
        with pytest.raises(RuntimeError, match="one pool per loop"):
            await asyncio.to_thread(asyncio.run, episode())
        await pool.close()

    asyncio.run(main())


def test_a_fresh_lease_gets_one_that_nobody_had_and_leaves_none():
    async def body(pool, backend):
        async with pool.lease("agent") as used:
            pass
        for _ in range(3):
            async with pool.lease("agent", isolation="fresh") as box:
                assert box.sandbox.resets == 0
                assert box.sandbox is not used.sandbox
            assert box.sandbox.closed
            assert box.sandbox.resets == 0
        assert pool.counts.recycled == 3
        assert pool.counts.replaced == 0
        assert sum(not box.closed for box in backend.opened) <= 2

    run(body)


def test_fresh_ones_do_not_add_up_with_idle_ones():
    async def body(pool, backend):
        async with pool.lease("agent"), pool.lease("agent"):
            pass
        async with pool.lease("agent", isolation="fresh"), pool.lease("agent", isolation="fresh"):
            assert sum(not box.closed for box in backend.opened) == 2

    run(body)


def test_what_a_task_needs_is_permitted_for_one_episode():
    async def body(pool, backend):
        async with pool.lease("agent") as plain, pool.lease("agent", needs=["ptrace"]) as box:
            assert box.sandbox.needs == {"ptrace"}
            assert plain.sandbox.needs == set()
        assert box.sandbox.closed
        async with pool.lease("agent") as one, pool.lease("agent") as two:
            assert one.sandbox.needs == two.sandbox.needs == set()
        for terms in ({"needs": ["root"]}, {"needs": "root"}, {"isolation": "Fresh"}):
            with pytest.raises(ConfigError, match="of an environment"):
                async with pool.lease("agent", **terms):
                    pass
        with pytest.raises(ValueError, match="unknown"):
            SandboxLimits(needs=frozenset({"root"}))

    run(body)


def test_a_reset_that_fails_in_any_way_ends_the_sandbox_and_not_the_episode():
    async def body(pool, backend):
        async with pool.lease("agent") as box:

            async def full(files=()):
                raise OSError(24, "Too many open files")

            box.sandbox.reset = full
        assert backend.opened[0].closed and pool.counts.replaced == 1

    run(body)


def test_a_lost_one_is_replaced_in_the_background():
    async def body(pool, backend):
        async with pool.lease("agent") as box:
            box.sandbox.lost = True
        await until(lambda: len(backend.opened) == 2 and not backend.starting)
        await asyncio.gather(*pool._tasks)
        backend.failing = True  # the next one is there already
        async with pool.lease("agent") as box:
            assert box.sandbox is backend.opened[1]
            box.sandbox.lost = True
        await until(lambda: pool.counts.unstarted == 1)
        with pytest.raises(SandboxLost, match="not installed"):
            async with pool.lease("agent"):
                pass
        backend.failing = False
        async with pool.lease("agent"), pool.lease("agent"):
            pass

    run(body, open_s=0.01)


def test_a_lease_waits_for_the_one_that_is_starting():
    async def body(pool, backend):
        async with pool.lease("agent") as box:
            box.sandbox.lost = True
        async with pool.lease("agent"):
            pass
        assert len(backend.opened) == 2

    run(body, open_s=0.02)


def test_after_so_many_resets_it_is_recycled():
    async def body(pool, backend):
        for _ in range(8):
            async with pool.lease("agent"):
                pass
        await until(lambda: [box.resets for box in backend.opened] == [3, 3, 0])
        assert (pool.counts.recycled, pool.counts.replaced) == (2, 0)

    run(body, {"recycle_after": 3})


def test_starts_are_bounded():
    async def body(pool, backend):
        await pool.warm("agent")
        assert len(backend.opened) == 30
        assert backend.most_starting == min(30, 2 * len(os.sched_getaffinity(0)))
        async with pool.lease("agent"):
            pass
        assert len(backend.opened) == 30

    run(body, {"size": 30}, open_s=0.002)


def test_who_keeps_a_lease_cannot_reach_the_next_episode():
    async def body(pool, backend):
        async with pool.lease("agent") as first:
            left = asyncio.ensure_future(first.exec(["sleep"], timeout_s=30))
            await asyncio.sleep(0)
        async with asyncio.timeout(60), pool.lease("agent") as second:
            assert second.sandbox is first.sandbox
            assert second.epoch > first.epoch
            with pytest.raises(SandboxLost, match="has ended"):
                await first.ping()
            with pytest.raises(SandboxLost, match="ended mid-call"):
                await left
            await second.ping()

    run(body)


def test_a_cancelled_call_stays_cancelled_when_its_lease_ends():
    async def body(pool, backend):
        async with pool.lease("agent") as box:
            left = asyncio.ensure_future(box.exec(["sleep"], timeout_s=30))
            await asyncio.sleep(0)
            left.cancel()
            box.end()
        await asyncio.gather(left, return_exceptions=True)
        assert left.cancelled()

    run(body)


def test_untrusted_code_runs_behind_a_boundary_or_where_it_is_trusted():
    async def body(pool, backend):
        with pytest.raises(ConfigError, match=r"no boundary.*--trust"):
            async with pool.lease("agent", untrusted=True):
                pass
        backend.is_boundary = True
        async with pool.lease("agent", untrusted=True):
            pass

    async def trusting(pool, backend):
        async with pool.lease("agent", untrusted=True):
            pass

    run(body)
    run(trusting, {"trust": True})
    assert open_pool("trusted-process")._trust and not open_pool("process")._trust


def test_sizes():
    assert default_size(SandboxLimits()) >= 1
    assert default_size(SandboxLimits(memory_mb=10**9)) == 1
    with pytest.raises(ConfigError, match="size=0"):
        Pool(FakeBackend(), size=0)
    with pytest.raises(ConfigError, match="recycle_after=0"):
        Pool(FakeBackend(), recycle_after=0)


def test_one_need_may_be_written_as_a_word():
    async def body(pool, backend):
        with pytest.raises(ConfigError, match=r"needs=\['root'\] of an environment are unknown"):
            async with pool.lease("agent", needs="root"):
                pass
        async with pool.lease("agent", needs="ptrace"):
            pass

    run(body)
