"""GymEnv: a real environment for anything that speaks gymnasium, without made-up numbers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from helpers import Echo, call, children, make_task, wait_for
from hypothesis import given
from hypothesis import strategies as st

from agentrl import make
from agentrl.chat.parsers import FORMATTERS
from agentrl.errors import ConfigError, InfraError, SandboxLost, ToolFault, VerifierError
from agentrl.gym import GymEnv, Text
from agentrl.registry import environment_ids
from agentrl.sandboxes import open_pool
from agentrl.tools import tool
from agentrl.types import EndReason, Limits

TASK = make_task("own", hidden={"answer": "yes"})


def says(*calls, content: str = "") -> str:
    return FORMATTERS["hermes"](content, calls)


OPEN: list[GymEnv] = []


@pytest.fixture(autouse=True)
def closed():
    """Whatever a test opened is closed, even if it fails."""
    yield
    while OPEN:
        OPEN.pop().close()


def face(env=Echo, sandbox: str = "auto") -> GymEnv:
    OPEN.append(GymEnv(env, lambda: open_pool(sandbox, size=1)))
    return OPEN[-1]


def chat_settings(folder):
    """Prompts and a rule, which `chat-v0` has none of."""
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello?"}\n' * 4)
    (folder / "rule.py").write_text("def polite(prompt, answer):\n    return 1.0\n")
    return {"prompts": str(folder / "prompts.jsonl"), "reward": f"{folder / 'rule.py'}:polite"}


@pytest.mark.parametrize("env_id", environment_ids())
def test_the_checker_of_gymnasium_passes(env_id, bubblewrap, request, monkeypatch, tmp_path):
    settings = chat_settings(tmp_path) if env_id == "chat-v0" else {}
    if env_id in ("desk-v0", "inject-v0"):
        monkeypatch.setenv("AGENTRL_DATA", str(request.getfixturevalue("data_dir")))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        env = gymnasium.make(f"agentrl/{env_id}", **settings)
        env.reset(seed=1)
        env.step("hello")
        check_env(env.unwrapped)
        env.close()
    assert [str(warning.message) for warning in raised] == []


@pytest.mark.parametrize(
    ("imports", "env_id"),
    [
        ("import agentrl, gymnasium", "agentrl/bugfix-v0"),
        ("import gymnasium, agentrl", "agentrl/bugfix-v0"),
        ("import gymnasium", "agentrl:agentrl/bugfix-v0"),
    ],
)
def test_ids_are_known_in_any_order_of_imports_and_inside_a_running_loop(
    bubblewrap, imports, env_id
):
    program = (
        f"import asyncio, warnings; warnings.simplefilter('error'); {imports}\nasync def main():\n "
        f"   env = gymnasium.make('{env_id}', render_mode='ansi')\n    text, info ="
        " env.reset(seed=3, options={'split': 'test'})\n    print(len(text) > 10,"
        " info['task_id'] != '', len(info['tools']) > 2, env.render()[:6])\n   "
        " print(env.step('done')[1:4], 'torch' in __import__('sys').modules)\n   "
        " env.close()\nasyncio.run(main())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False
    )
    assert out.stdout.split("\n")[:2] == [
        "True True True [user]",
        "(0.0, True, False) False",
    ], out.stderr
    assert out.stderr == ""


def test_spaces_hold_any_text():
    env = face()
    for space in (env.action_space, env.observation_space):
        assert "schön 漢字 😀 \n\0" in space and 3 not in space
        space.seed(1)
        first = [space.sample() for _ in range(20)]
        space.seed(1)
        assert first == [space.sample() for _ in range(20)] and all(text in space for text in first)
    assert any("<tool_call>" in env.action_space.sample() for _ in range(30))
    assert "x" * 11 not in Text(10) and Text(10) == Text(10) != Text(11)


@given(st.text(max_size=60))
def test_any_text_is_an_action(text):
    env = face()
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(text)
    assert observation in env.observation_space and isinstance(reward, float)
    assert (terminated or truncated) == ("end_reason" in info)


def test_an_episode_to_its_reward():
    env = face()
    text, info = env.reset(options={"task": TASK})
    assert (
        text == "do it"
        and info["task_id"] == "own"
        and info["messages"] == [{"role": "user", "content": "do it"}]
    )
    observation, reward, terminated, truncated, info = env.step(
        says(call("say", text="über"), call("nope"))
    )
    assert observation.startswith("über\nerror: unknown_tool") and (
        reward,
        terminated,
        truncated,
    ) == (
        0.0,
        False,
        False,
    )
    _, reward, terminated, truncated, info = env.step("yes")
    assert (reward, terminated, truncated, info["end_reason"]) == (1.0, True, False, "answered")
    assert env.render() is None
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("again")
    env.close()


def test_a_limit_truncates_and_is_graded():
    class Short(Echo):
        limits = Limits(turns=2)

    env = face(Short)
    env.reset(options={"task": TASK})
    env.step(says(call("say", text="a")))
    _, reward, terminated, truncated, info = env.step(says(call("say", text="a")))
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "max_turns")


def test_the_order_of_calls_is_checked_and_close_is_not_the_end():
    env = face()
    env.close()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")
    env.reset(seed=1)
    env.close()
    env.close()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")
    env.reset(seed=1)
    assert env.step("no")[2]


def test_tasks_are_chosen_by_seed_id_split_or_given():
    env = make("calc-v0")
    first, again, other = (env.reset(seed=seed)[0] for seed in (5, 5, 6))
    assert first == again != other
    assert env.reset()[0] != env.reset()[0]
    class_env = face()
    assert class_env.reset(options={"task_id": "train-7"})[1]["task_id"] == "train-7"
    assert class_env.reset(options={"task_id": "test-0", "split": "test"})[1]["task_id"] == "test-0"
    for options, match in (
        ({"task_id": "none"}, "is not in split"),
        ({"tsak": 1}, "'tsak' is unknown"),
        ({"task": {"id": "x"}}, r"must be an agentrl\.Task"),
    ):
        with pytest.raises(ConfigError, match=match):
            class_env.reset(options=options)
    with pytest.raises(ConfigError, match="split"):
        env.reset(options={"split": "dev"})


def test_wrong_settings_are_refused():
    for kwargs, match in (
        ({"parser": "x"}, "parser='x'"),
        ({"operation": 2}, "operation"),
        ({"operations": 9}, "1 to 4"),
    ):
        with pytest.raises(ConfigError, match=match):
            make("calc-v0", **kwargs)
    with pytest.raises(ConfigError, match="did you mean 'calc-v0'"):
        make("calk-v0")
    env = make("calc-v0", sandbox="none")
    with pytest.raises(ConfigError, match="sandbox='none'"):
        env.reset()


def test_another_tool_format():
    env = make("calc-v0", parser="llama_json")
    env.reset(seed=0)
    answer = env.step(
        '{"name": "calculate", "parameters": {"left": 2, "operation": "*", "right": 4}}'
    )
    assert answer[0] == "8"


def test_vectors_of_environments_also_in_forked_processes():
    env = face()
    env.reset(
        seed=0
    )  # a loop thread runs, and a forked process inherits its object without the thread
    for mode, options in (("sync", {}), ("async", {"shared_memory": False, "context": "fork"})):
        many = gymnasium.make_vec(
            "agentrl/calc-v0", 2, vectorization_mode=mode, vector_kwargs=options
        )
        texts, _ = many.reset(seed=3)
        assert len(set(texts)) == 2
        _, rewards, ended, _, _ = many.step(["no", "no"])
        assert list(rewards) == [0.0, 0.0] and list(ended) == [True, True]
        many.close()


# Infrastructure


class Work(Echo):
    needs_sandbox = True

    @tool
    async def die(self) -> str:
        """Kill the sandbox, then use it."""
        os.kill(self.sandbox.sandbox._wire.peer.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        await self.sandbox.exec(["true"])
        return "still here"


def test_a_killed_sandbox_is_an_error_and_no_reward(bubblewrap):
    before = children()
    env = face(Work)
    env.reset(seed=0)
    with pytest.raises(SandboxLost):
        env.step(says(call("die")))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("yes")
    env.reset(options={"task": TASK})
    assert env.step("yes")[1] == 1.0
    env.close()
    wait_for(lambda: children() == before)


@pytest.mark.parametrize("place", ["verifier", "setup", "on_text", "close"])
def test_whatever_breaks_is_an_infra_error(place):
    async def broken(*args):
        raise KeyError(place)

    env = face(type("Broken", (Echo,), {place: broken}))
    expected: type[InfraError] = VerifierError if place == "verifier" else ToolFault
    with pytest.raises(expected, match=place):
        env.reset(seed=0)
        env.step("yes")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("yes")


def test_a_verdict_that_could_not_be_reached_is_an_error():
    from agentrl.types import Score

    async def ill(submission):
        return Score.failed("the judge is ill")

    env = face(type("Ill", (Echo,), {"verifier": ill}))
    env.reset(seed=0)
    with pytest.raises(VerifierError, match="the judge is ill"):
        env.step("yes")


class Breaks(Work):
    """Some words break it, and its clean-up works in its sandbox."""

    closed = 0

    async def on_text(self, message):
        if message.content == "boom":
            raise RuntimeError("boom")
        return await super().on_text(message)

    async def close(self):
        assert (await self.sandbox.exec(["true"])).exit_code == 0
        self.closed += 1


def test_a_step_that_fails_closes_its_environment_before_its_sandbox_is_gone(bubblewrap):
    env = face(Breaks, "bubblewrap")
    env.reset(options={"task": TASK})
    played = env.env
    _, reward, terminated, _, info = env.step("boom")
    assert (reward, terminated, info["end_reason"]) == (0.0, True, "agent_fault")
    assert played.closed == 1
    env.reset(options={"task": TASK})
    assert env.step("yes")[1] == 1.0 and played.closed == 1


def test_a_clean_up_that_an_agent_breaks_is_its_fault_and_not_the_next_episodes():
    class Untidy(Echo):
        async def close(self):
            if broken := getattr(self, "broken", ""):
                raise OSError(broken)

        async def on_text(self, message):
            self.broken = "" if message.content == "yes" else message.content
            return await super().on_text(message) if message.content != "boom" else 1 / 0

    env = face(Untidy)
    for text in ("no", "boom"):
        env.reset(options={"task": make_task(hidden={"answer": "yes"}, oracle={"answer": "yes"})})
        _, reward, _, _, info = env.step(text)
        assert (reward, info["end_reason"]) == (0.0, "agent_fault")
    env.reset(options={"task": TASK})
    assert env.step("yes")[1] == 1.0


def test_two_at_once_and_resets_in_the_middle(bubblewrap):
    before = children()
    first, second = face(Work, "bubblewrap"), face(Work, "bubblewrap")
    for _ in range(3):
        first.reset(seed=1)
        second.reset(seed=2)
        first.step(says(call("say", text="a")))
    second.close()
    first.reset(options={"task": TASK})
    assert first.step("yes")[1] == 1.0
    first.close()
    wait_for(lambda: children() == before)


def test_a_tool_of_the_last_episode_cannot_end_the_next_one():
    class Late(Echo):
        limits = Limits(tool_s=0.05)

        @tool
        def finish_late(self) -> str:
            """Outlive the time limit, then end the episode."""
            time.sleep(0.3)
            self.finish(EndReason.VIOLATION)
            return ""

    env = face(Late)
    env.reset(seed=0)
    assert env.step(says(call("finish_late")))[0].startswith("error: timeout")
    env.reset(seed=1)
    time.sleep(0.4)
    assert env.step(says(call("say", text="a")))[2] is False


def test_it_works_on_the_thread_of_a_running_loop():
    async def main():
        env = face()
        env.reset(options={"task": TASK})
        return env.step("yes")[1]

    assert asyncio.run(main()) == 1.0
