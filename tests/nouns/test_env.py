"""ToolEnv: what an environment sees, says and may not do."""

import asyncio

import pytest
from helpers import Echo, call, make_task, play_one, right, says, script

from agentrl.env import Step, ToolEnv
from agentrl.errors import ContractError
from agentrl.runner import Runner
from agentrl.tools import tool
from agentrl.types import EndReason, Message, Task, TaskView
from agentrl.verifiers.base import Submission


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
    asyncio.run(Runner(Spy()).reset(task))
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
    [("silent", "no message and no ending"), ("fail", "sandbox_lost"), ("lose", "engine_error")],
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


@pytest.mark.parametrize("name", ["setup", "close", "on_text"])
def test_a_method_that_is_awaited_and_is_not_async_is_refused_when_the_class_is_made(name):
    with pytest.raises(ContractError, match=f"Plain.{name} is awaited: write async def {name}"):
        type("Plain", (ToolEnv,), {name: lambda self: None})
