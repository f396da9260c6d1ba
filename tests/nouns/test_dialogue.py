"""Users who answer: a script, a policy with the sides exchanged, and a real model."""

import pytest
from chat_server import chat_server, completion
from helpers import make_task, tiny_model_folder

from agentrl import Dialogue, Limits, Message, Score, tool
from agentrl.dialogue import STOP
from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.types import EndReason


async def tea(submission):
    """Content if the agent's last words name what the user wanted."""
    return Score(float("tea" in submission.answer))


class Desk(Dialogue):
    """Book what the user asks for."""

    id = "desk-v0"
    system = "You take orders."
    limits = Limits(turns=4, turn_tokens=16, wall_s=60)
    verifier = staticmethod(tea)

    def tasks(self, split, seed):
        user = {"goal": "You want tea.", "lines": ["Tea, please.", "No, thank you."]}
        for number in range(2):
            yield make_task(f"{split}-{number}", instruction="Hello.", metadata={"user": user})

    def oracle_actions(self, task):
        yield Message.assistant("What may it be?")
        yield Message.assistant("Anything else?")
        yield Message.assistant("So it is tea.")

    @tool
    def look(self) -> str:
        """Look at the menu."""
        return "tea"


def roles(episode):
    return [message.role for message in episode.messages]


def played(out, **settings):
    result = evaluate(EvalPlan(Desk, out=out, **settings))
    return result, list(read_episodes(out / "episodes.jsonl").values())


def test_a_script_answers_until_its_lines_end(tmp_path):
    result, episodes = played(tmp_path)
    assert result["pass_at"]["1"] == 1.0
    assert roles(episodes[0]) == ["system", "user"] + ["assistant", "user"] * 2 + ["assistant"]
    assert episodes[0].messages[3].content == "Tea, please."
    assert {episode.end for episode in episodes} == {EndReason.ANSWERED}


def test_a_served_model_speaks_for_the_user_and_reads_the_other_side(tmp_path):
    pytest.importorskip("openai")
    told = (completion("Tea, please."), completion(f"Thank you. {STOP}"))
    with chat_server(*told, *told) as server:
        result, episodes = played(tmp_path, user=f"openai:m@{server.url}", concurrency=1, limit=2)
    assert result["pass_at"]["1"] == 0.0 and result["budget"]["user"].startswith("openai:m@")
    assert episodes[0].messages[3].content == "Tea, please." and len(episodes[0].messages) == 5
    first, second = (request["messages"] for request in server.requests[:2])
    assert "You want tea." in first[0]["content"] and "tools" not in server.requests[0]
    assert [row["role"] for row in second] == ["system", "user", "assistant", "user"]
    assert second[1]["content"] == "What may it be?" and second[2]["content"] == "Tea, please."
    assert all("You want tea." not in str(message) for e in episodes for message in e.messages)


def test_a_model_of_our_own_speaks_for_the_user(tmp_path):
    result, episodes = played(tmp_path, user=f"hf:{tiny_model_folder()}", limit=1)
    assert result["n_failed_infra"] == 0 and roles(episodes[0])[:3] == [
        "system",
        "user",
        "assistant",
    ]
    assert len(roles(episodes[0])) > 4


def test_a_user_that_is_away_is_nobodys_score(tmp_path):
    pytest.importorskip("openai")
    result, _ = played(tmp_path, user="openai:m@http://127.0.0.1:9/v1", limit=1)
    assert result["n_failed_infra"] == 1 and result["pass_at"]["1"] is None


@pytest.mark.parametrize(
    ("settings", "part"),
    [({"user": "noop"}, "says nothing"), ({"user": "gpt"}, "is unknown: use")],
)
def test_a_user_that_cannot_speak_is_refused(settings, part):
    with pytest.raises(ConfigError, match=part):
        evaluate(EvalPlan(Desk, **settings))


def test_an_environment_without_a_user_has_none_to_set():
    from helpers import Echo

    with pytest.raises(ConfigError, match="goes with a dialogue, and echo-v0 has no user"):
        evaluate(EvalPlan(Echo, user="openai:m@http://127.0.0.1:9/v1"))
