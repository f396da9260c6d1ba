"""Served models in episodes and evaluations: limits, costs, connections, the command line."""

from __future__ import annotations

import asyncio
import socket

import pytest
from chat_server import chat_server, completion
from helpers import Echo, make_task, play_one, run_cli
from served_cases import HI

from agentrl.aio import LoopThread
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.audit import AuditPlan, audit
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.policies import served
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import Prices, ServedPolicy
from agentrl.records.files import read_episodes
from agentrl.tools import tool
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group
from agentrl.types import EndReason, Limits


def test_an_episode_of_several_turns_is_counted_priced_and_refused_by_pack():
    answers = (
        completion(None, calls=[("say", '{"text": "a"}')], usage=(10, 4)),
        completion(None, calls=[("say", "{")], usage=(20, 5)),
        completion("yes", usage=(30, 6)),
    )
    with chat_server(*answers) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url, prices=Prices(2.0, 10.0)))
    assert (
        episode.end is EndReason.ANSWERED and episode.reward == 1.0 and episode.trajectories == ()
    )
    counts = episode.counts
    assert (counts.sampled_tokens, counts.prompt_tokens, counts.bad_calls) == (15, 60, 1)
    assert counts.usd == pytest.approx((60 * 2 + 15 * 10) / 1e6)
    roles = [row["role"] for row in server.requests[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    with pytest.raises(UserError, match="TokenPolicy"):
        pack([Group((episode,))], 0)


def test_the_token_limit_of_an_episode_ends_it():
    class Short(Echo):
        limits = Limits(turn_tokens=10, episode_tokens=15, turns=9)

    with chat_server(completion(None, calls=[("say", '{"text": "a"}')], usage=(1, 8))) as server:
        episode = play_one(Short, ServedPolicy("m", server.url))
    assert (
        episode.end is EndReason.MAX_TOKENS and episode.reward == 0.0 and episode.counts.usd is None
    )
    assert [request["max_completion_tokens"] for request in server.requests] == [10, 7]


def test_a_server_that_is_down_gives_no_score():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        episode = play_one(Echo, ServedPolicy("m", url, options=ServedOptions(retries=0)))
    assert (episode.end, episode.reward) == (
        EndReason.ENGINE_ERROR,
        None,
    ) and "Connection error" in episode.failure


class Sayer(Echo):
    """Ends where the answer is right."""

    count = 3

    @tool
    def unused(self) -> str:
        """Nothing."""
        return ""


def test_an_evaluation_of_a_served_model(tmp_path):
    with chat_server(completion("yes", usage=(100, 10))) as server:
        plan = {
            "make": Sayer,
            "policy": f"openai:org/m@1@{server.url}",
            "samples": 2,
            "out": tmp_path,
            "seed": 1,
        }
        result = evaluate(EvalPlan(**plan, prices=(1.0, 2.0), limit=3))
    assert result["pass_at"]["1"] == 1.0 and result["n_episodes"] == 6
    assert result["cost"]["sampled_tokens"] == 60 and result["cost"]["usd"] == pytest.approx(
        6 * 120 / 1e6
    )
    assert {request["model"] for request in server.requests} == {"org/m@1"}
    assert (
        sum(episode.counts.usd for episode in read_episodes(tmp_path / "episodes.jsonl").values())
        > 0
    )


@pytest.mark.parametrize(
    "address", ["localhost/v1", "localhost:8000", "127.0.0.1:8000/v1", "my.host/v1"]
)
def test_an_address_without_http_is_never_sent_to_another_server(address, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    with pytest.raises(ConfigError, match=f"base_url='{address}' is no address"):
        evaluate(EvalPlan(Sayer, f"openai:m@{address}"))


def test_the_command_line_evaluates_a_served_model():
    with chat_server(completion("0", usage=(100, 10))) as server:
        words = (
            "eval",
            "calc-v0",
            "--limit",
            "2",
            "--policy",
            f"openai:m@{server.url}",
            "--price",
            "1,2",
        )
        out = run_cli(*words, OPENAI_API_KEY="")
    assert out.returncode == 0 and "US$ 0.0002" in out.stdout, out.stderr


def test_one_policy_serves_several_event_loops_at_the_same_time():
    other = LoopThread()
    with chat_server(completion("yes")) as server:
        policy = ServedPolicy("m", server.url)

        async def ask():
            with policy.player(make_task(), Limits(), 0) as player:
                return (await player.act(HI, ()))[0].content

        async def ask_and_close():
            said = await ask()
            await policy.close()
            await policy.close()
            return said

        try:
            assert (
                other.run(ask())
                == asyncio.run(ask_and_close())
                == other.run(ask_and_close())
                == "yes"
            )
        finally:
            other.close()


@pytest.mark.parametrize("command", ["eval", "audit"])
def test_a_command_closes_its_connections(command, monkeypatch):
    made: list = []
    client = served._client_class()
    monkeypatch.setattr(
        served, "_client_class", lambda: lambda **given: made.append(client(**given)) or made[-1]
    )
    with chat_server(completion("yes")) as server:
        name = f"openai:m@{server.url}"
        if command == "eval":
            evaluate(EvalPlan(Echo, name, limit=2, sandbox="process"))
        else:
            audit(AuditPlan(Echo, tasks=2, sandbox="process", policy=name))
    assert len(server.requests) >= 2 and made and all(each.is_closed() for each in made)
