"""ToolEnv: what an environment sees, its chance, its limits, its start state."""

import asyncio
import random

import pytest
from helpers import Echo, call, make_task, play_one, right, says, script

from agentrl.env import Step, ToolEnv
from agentrl.errors import ConfigError, ContractError
from agentrl.sandboxes import SandboxLimits, open_pool
from agentrl.tools import tool
from agentrl.types import BadCall, EndReason, Limits, Message, Task, TaskView
from agentrl.verifiers.base import Submission


class Dice(Echo):
    """Its start and its tools are random."""

    async def setup(self) -> None:
        self.first = self.rng.random()

    def prompt(self) -> list[Message]:
        return [Message.user(f"{self.task.instruction} {self.first}")]

    @tool
    async def roll(self) -> str:
        """Roll a die."""
        return str(self.rng.random())


class Chatty(Echo):
    async def on_text(self, message: Message) -> Step:
        if message.content == "stop":
            self.finish(EndReason.VIOLATION)
        if message.content == "fail":
            self.finish(EndReason.SANDBOX_LOST)
        if message.content == "lose":
            return Step(end=EndReason.ENGINE_ERROR)
        return Step(()) if message.content == "silent" else Step((Message.user("go on"),))


def test_an_environment_never_holds_the_hidden_part():
    seen = []

    class Spy(Echo):
        async def setup(self) -> None:
            seen.append((type(self.task), vars(self), repr(self.__dict__)))

    task = make_task(hidden={"answer": "SECRET"}, oracle={"answer": "SECRET"}, metadata={"a": [1]})
    asyncio.run(Spy().reset(task))
    kind, _, text = seen[0]
    assert kind is TaskView and "SECRET" not in text


def test_a_task_that_an_environment_changes_is_its_own_copy():
    class Greedy(Echo):
        async def setup(self) -> None:
            self.task.metadata["rows"].append(1)

    task = make_task(metadata={"rows": []}, hidden={"answer": "yes"})
    first, second = (play_one(Greedy, script(says(content="yes")), task) for _ in range(2))
    assert (
        task.metadata == {"rows": []}
        and first.task.metadata == {"rows": []}
        and first.start == second.start
    )


def test_two_environments_do_not_share_their_chance():
    async def run(*turns: int) -> list[str]:
        envs = [Dice(), Dice()]
        for seed, env in enumerate(envs):
            await env.reset(make_task(), seed=seed)
        rolls: list[list[str]] = [[], []]
        for index in turns:
            random.random()
            step = await envs[index].step(says(call("roll")))
            rolls[index].append(step.messages[0].content)
        return rolls

    together = asyncio.run(run(0, 1, 1, 0, 1, 0))
    apart = [asyncio.run(run(0, 0, 0))[0], asyncio.run(run(1, 1, 1))[1]]
    assert together == apart and together[0] != together[1]


def test_equal_seeds_give_equal_starts_and_the_start_covers_all_of_them():
    async def start(env=Dice, task=None, seed=1) -> str:
        env = env()
        await env.reset(task or make_task(), seed=seed)
        return env.start

    class Other(Dice):
        @tool
        def more(self) -> str:
            """One more tool."""
            return ""

    first = asyncio.run(start())
    assert first == asyncio.run(start())
    assert first != asyncio.run(start(seed=2))
    assert first != asyncio.run(start(task=make_task(instruction="other")))
    assert first != asyncio.run(start(env=Other))


def test_the_start_covers_the_files_of_the_sandbox(bubblewrap):
    class Files(Echo):
        needs_sandbox = True

    async def start(text: str) -> str:
        env, pool = Files(), open_pool("bubblewrap", size=1)
        async with pool.lease("agent") as sandbox:
            await env.reset(make_task(files={"a/b.txt": text}), sandbox=sandbox)
        await pool.close()
        return env.start

    async def all_starts() -> list[str]:
        return [await start("x"), await start("x"), await start("y")]

    one, same, other = asyncio.run(all_starts())
    assert one == same != other


@pytest.mark.parametrize(
    ("limits", "turns", "end"),
    [
        (Limits(turns=2), [says(call("say", text="a"))] * 5, EndReason.MAX_TURNS),
        (Limits(tool_calls=2), [says(call("say", text="a"))] * 5, EndReason.MAX_TOOL_CALLS),
        (Limits(bad_calls=2), [says(BadCall("{", "no"))] * 5, EndReason.FORMAT_ERROR),
        (Limits(turns=2), [says(call("say", text="a")), says(call("submit"))], EndReason.SUBMITTED),
        (Limits(), [says(content="no")], EndReason.ANSWERED),
    ],
)
def test_every_limit_has_its_ending_and_is_graded(limits, turns, end):
    class Limited(Echo):
        pass

    Limited.limits = limits
    episode = play_one(Limited, script(*turns))
    assert episode.end is end and episode.score.value == 0.0
    assert episode.truncated is (end in (EndReason.MAX_TURNS, EndReason.MAX_TOOL_CALLS))


def test_on_text_can_end_or_go_on():
    episode = play_one(Chatty, script(says(content="hm"), says(content="stop")))
    assert [message.content for message in episode.messages] == [
        "do it",
        "hm",
        "go on",
        "stop",
        "go on",
    ]
    assert episode.end is EndReason.VIOLATION


@pytest.mark.parametrize(
    ("word", "match"),
    [("silent", "speak to nobody"), ("fail", "sandbox_lost"), ("lose", "engine_error")],
)
def test_environments_cannot_end_in_silence_or_as_a_failure(word, match):
    with pytest.raises(ContractError, match=match):
        play_one(Chatty, script(says(content=word)))


def test_a_sandbox_must_be_asked_for():
    class Forgot(Echo):
        @tool
        async def run(self) -> str:
            """Run."""
            return str(await self.sandbox.manifest())

    class Asked(Forgot):
        needs_sandbox = True

    with pytest.raises(ContractError, match="needs_sandbox = True"):
        play_one(Forgot, script(says(call("run"))))
    with pytest.raises(ContractError, match="choose one with sandbox="):
        play_one(Asked, script(says(call("run"))))


def test_close_is_idempotent_and_early_close_is_fine():
    async def run():
        env = Echo()
        await env.close()
        await env.reset(make_task())
        await env.close()
        await env.close()

    asyncio.run(run())
    assert Echo().counts().wall_s == 0.0


def test_a_verifier_that_is_a_plain_function_stays_one():
    async def judge(submission: Submission):
        return await right(submission)

    class Plain(ToolEnv):
        id = "plain-v0"
        verifier = judge

    class Child(Plain):
        pass

    assert Plain().verifier is judge and Child().verifier is judge
    assert play_one(Child, script(says(content="yes"))).score.value == 1.0


def test_default_oracle_actions_call_and_answer():
    task = make_task(oracle={"calls": [{"name": "say", "arguments": {"text": "x"}}], "answer": 7})
    turns = list(Echo().oracle_actions(task))
    assert [turn.content for turn in turns] == ["", "7"] and turns[0].tool_calls[0].name == "say"


def test_an_environment_without_tasks_says_so():
    with pytest.raises(ContractError, match="does not define tasks"):
        ToolEnv().tasks("train", 0)


def test_the_system_message_comes_first():
    class Spoken(Echo):
        system = "Be brief."

    assert [m.role for m in play_one(Spoken, script()).messages[:2]] == ["system", "user"]
    assert isinstance(make_task(), Task)


def test_an_environment_says_what_its_sandboxes_are(monkeypatch):
    class Large(Echo):
        needs_sandbox = True
        sandbox_limits = SandboxLimits(memory_mb=1024)

    assert Large().open_pool("process").limits.memory_mb == 1024
    assert Echo().open_pool("process").limits == SandboxLimits()
    monkeypatch.setattr(Large, "network", ("example.org",))
    with pytest.raises(ConfigError, match=r"cannot keep agents to the hosts"):
        Large().open_pool("process")
    monkeypatch.setattr(Large, "network", ())
    monkeypatch.setattr(Large, "untrusted", True)
    with pytest.raises(ConfigError, match=r"no boundary"):
        Large().open_pool("process")
    assert Large().open_pool("trusted-process").size >= 1


def test_limits_of_an_environment_hold_in_its_sandbox(bubblewrap):
    class Small(Echo):
        needs_sandbox = True
        sandbox_limits = SandboxLimits(open_files=77)

    async def main():
        pool = Small().open_pool("bubblewrap", 1)
        try:
            async with pool.lease("agent") as box:
                return await box.exec(["sh", "-c", "ulimit -n"])
        finally:
            await pool.close()

    assert asyncio.run(main()).stdout.strip() == b"77"


class Declares(Echo):
    """Says what leaves the sandbox once, for all tasks that do not say it themselves."""

    artifacts = ("answer.txt",)

    def tasks(self, split, seed):
        yield make_task("plain")
        yield make_task("own", artifacts=["own.txt"])


def test_tasks_have_the_artifacts_of_their_class():
    assert [task.artifacts for task in Declares().tasks("train", 0)] == [
        ("answer.txt",),
        ("own.txt",),
    ]

    class Heir(Declares):
        artifacts = ("other.txt",)

        def tasks(self, split, seed):
            yield from super().tasks(split, seed)

    assert [task.artifacts for task in Heir().tasks("train", 0)] == [("other.txt",), ("own.txt",)]
    assert [task.artifacts for task in Echo().tasks("train", 0)] == [()] * len(
        list(Echo().tasks("train", 0))
    )
