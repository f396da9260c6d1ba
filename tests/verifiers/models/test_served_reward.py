"""Versions of a reward model: published, compared, served over HTTP, watched, withdrawn."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request

import pytest
from helpers import make_task
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import ranked_pairs, reward_folder, serving, talk

from agentrl.errors import ConfigError, ContractError, VerifierError
from agentrl.trainers.offline.sampling import open_judge
from agentrl.types import EndReason, Message, ToolCall
from agentrl.verifiers.base import Submission, grade
from agentrl.verifiers.models import reward_server
from agentrl.verifiers.models.heads import clipped
from agentrl.verifiers.models.named import named_reward
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.reward_server import _read
from agentrl.verifiers.models.reward_store import RewardStore
from agentrl.verifiers.models.served_reward import ServedReward


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two reward models of one tokenizer."""
    place = tmp_path_factory.mktemp("models")
    return [reward_folder(place / name, seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="module")
def published(models, tmp_path_factory):
    """A store with one version."""
    folder = tmp_path_factory.mktemp("stores") / "rewards"
    RewardStore(folder).publish(models[0], ranked_pairs())
    return folder


@pytest.fixture
def store(published, tmp_path):
    """A copy of it."""
    return RewardStore(shutil.copytree(published, tmp_path / "rewards"))


def judged(verifier, *answers):
    """Scores of answers to one prompt, asked at the same time."""

    async def everything():
        asked = (
            Submission(make_task(), talk("What?", answer), EndReason.ANSWERED) for answer in answers
        )
        return await asyncio.gather(*(grade(verifier, one) for one in asked))

    return asyncio.run(everything())


def post(url, body, **headers):
    """Status and answer of a request; anything but bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/score", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


ONE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_a_version_knows_how_it_ranks_the_pairs_of_its_store(store, models):
    first, model = store.served(), RewardModel.load(models[0])
    scores = [asyncio.run(model.score(one)) for pair in ranked_pairs()[:3] for one in pair]
    assert first.scores[:6] == pytest.approx(scores, abs=1e-5)
    second = store.publish(models[1])
    ranks = [
        [a > b for a, b in zip(one.scores[::2], one.scores[1::2], strict=True)]
        for one in (first, second)
    ]
    assert second.accuracy == sum(ranks[1]) / 60
    assert second.agreement == sum(a == b for a, b in zip(*ranks, strict=True)) / 60 < 1
    assert [one.number for one in store.versions()] == [1, 2] and store.served() == second


def test_what_cannot_be_published_leaves_the_store_as_it_was(store, models, tmp_path):
    with pytest.raises(ConfigError, match="are those of version 1, which is served"):
        store.publish(models[0])
    with pytest.raises(ConfigError, match="leave --pairs out, or begin another store"):
        store.publish(models[1], ranked_pairs())
    with pytest.raises(ConfigError, match="has no pairs yet: give --pairs FILE"):
        RewardStore(tmp_path / "new").publish(models[0])
    with pytest.raises(ConfigError, match="are no reference for drift"):
        RewardStore(tmp_path / "new").publish(models[0], ranked_pairs()[:5])
    with pytest.raises(ConfigError, match="is no reward model"):
        store.publish(str(shutil.copytree(_policy(), tmp_path / "policy")))
    assert store.numbers() == [1] and not list(store.folder.glob("versions/.draft-*"))


def _policy():
    from helpers import tiny_model_folder

    return tiny_model_folder()


def test_what_a_killed_publisher_left_is_no_version_and_is_cleared_away(store, models):
    left = store.folder / "versions" / ".draft-x"
    left.mkdir()
    assert store.numbers() == [1]
    assert store.publish(models[1]).number == 2 and not left.exists()


def test_rollback_serves_the_older_one_and_leaves_the_last_one(store, models):
    with pytest.raises(ConfigError, match="version 1 is the only one"):
        store.rollback("bad")
    store.publish(models[1])
    bad, served = store.rollback("it likes long answers")
    assert (bad.number, served.number) == (2, 1) and store.numbers() == [1]
    assert store.withdrawn(2) == "it likes long answers"
    assert store.publish(models[1]).number == 3, "a withdrawn one can be published again"


def test_a_version_that_is_not_what_was_published_is_not_served(store):
    place = store.folder / "versions" / "1"
    (place / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="its files have changed"):
        store.load(1)


def test_a_version_that_scores_otherwise_here_is_not_served(store):
    path = store.folder / "versions" / "1" / "version.json"
    row = json.loads(path.read_text())
    row["scores"][7] += 1.0
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="scores its own pairs otherwise here"):
        store.load(1)


def test_a_served_model_says_what_it_says_in_process(store, models):
    answers, long = ("4", "yes, please", "\ud800 no"), "word " * 600
    here = RewardModel.load(models[0], bound=clipped(-3, 3))
    with serving(store) as (url, _):
        there = ServedReward(url, bound=clipped(-3, 3), max_batch=2)
        ours, theirs = judged(here, *answers[:2], long), judged(there, *answers[:2], long)
        assert [one.value for one in theirs] == pytest.approx([one.value for one in ours], abs=1e-5)
        assert theirs[2].why == ours[2].why and theirs[2].parts["too_long"] == 1.0
        assert theirs[0].parts["version"] == 1.0
        call = ToolCall("say", {"text": "yes"})
        talked = (*talk("a", "b")[:1], Message.assistant("", call), Message.tool("yes", call))
        assert asyncio.run(there.score(talked)) == pytest.approx(
            asyncio.run(here.score(talked)), abs=1e-5
        )


def test_rewards_of_one_process_are_of_one_version_until_it_is_withdrawn(store, models):
    with serving(store) as (url, said):
        early = ServedReward(url)
        judged(early, "4")
        store.publish(models[1])
        late, named = ServedReward(url), ServedReward(f"{url}/@1")
        assert [judged(one, "4")[0].parts["version"] for one in (early, late, named)] == [1, 2, 1]
        assert judged(early, "4")[0].value != judged(late, "4")[0].value
        store.rollback("it likes long answers")
        with pytest.raises(ContractError, match=r"version 2 was withdrawn \(it likes long"):
            judged(late, "4")
        assert judged(late, "4")[0].parts["version"] == 1, "who goes on, goes on with the older one"
        now = [judged(one, "4")[0].parts["version"] for one in (ServedReward(url), early)]
        assert now == [1, 1]
        with pytest.raises(ContractError, match="there is no version 9"):
            judged(ServedReward(f"{url}@9"), "4")
        assert said == ["version 2 is loaded"]


def test_scores_that_move_away_are_told_once_and_stand_in_every_score(store):
    with serving(store, window=60) as (url, said):
        model = ServedReward(url)
        first = judged(model, *(f"Yes {at}" for at in range(20)))[-1]
        assert "psi" not in first.parts, "too few"
        for _ in range(3):
            last = judged(model, *["zzz " * 60] * 60)[-1]
        assert last.parts["psi"] > 0.25 and last.parts["beyond"] in (0.0, 1.0)
        assert sum("PSI" in sentence for sentence in said) == 1
        (row,) = model.status()["loaded"]
        assert row["version"] == 1 and row["scored"] == 200 and row["psi"] > 0.25


def test_a_key_is_asked_for(store, monkeypatch):
    with serving(store, key="secret") as (url, _):
        monkeypatch.delenv("AGENTRL_REWARD_KEY", raising=False)
        with pytest.raises(ContractError, match=r"send the server's key.*set AGENTRL_REWARD_KEY"):
            judged(ServedReward(url), "4")
        assert post(url, {"conversations": [ONE]}, authorization="Bearer other")[0] == 401
        monkeypatch.setenv("AGENTRL_REWARD_KEY", "secret")
        assert judged(ServedReward(url), "4")[0].parts["version"] == 1


BAD = {
    b"[": "is no JSON",
    b"[" * 100_000: "is no JSON",
    b"\xff": "is no JSON",
    b"[]": "must be a list of 1 to 256",
    b'{"conversations": []}': "must be a list of 1 to 256",
    b'{"conversations": [[]]}': "one is empty",
    b'{"conversations": [5]}': "a list of messages",
    b'{"conversations": [["x"]]}': "a list of messages",
    b'{"conversations": [[{"role": "god", "content": "x"}]]}': "role='god' must be one of",
    b'{"conversations": [[{"role": "user", "content": 5}]]}': "content=5 must be a text",
    b'{"conversations": [[{"role": "user"}]]}': "a list of messages",
    b'{"conversations": [[{"role": "user", "content": "x"}]], "version": true}': "version=True",
    b'{"conversations": [[{"role": "user", "content": "x"}]], "version": 0}': "version=0",
}


def test_what_is_no_request_is_a_sentence_and_the_server_lives_on(store):
    with serving(store) as (url, _):
        for body, why in BAD.items():
            status, found = post(url, body)
            assert status == 400 and why in found["error"], body[:60]
        assert post(url, b"x" * (reward_server.MOST_BYTES + 1))[0] == 413
        assert post(url, {"conversations": [ONE]})[0] == 200


KEYS = ("conversations", "version", "role", "content", "tool_calls", "name")
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


def inside(one):
    """Lists and objects of values, with the names of a request among others."""
    names = st.sampled_from(KEYS) | st.text(max_size=3)
    return st.lists(one, max_size=3) | st.dictionaries(names, one, max_size=4)


@given(st.recursive(VALUES, inside, max_leaves=12))
def test_no_body_is_read_into_anything_but_messages(body):
    try:
        conversations, wanted = _read(body)
    except reward_server.RequestRefused as refused:
        assert refused.status == 400
    else:
        assert all(isinstance(m, Message) for one in conversations for m in one)
        assert wanted is None or wanted >= 1


def test_a_batch_of_too_many_bytes_is_cut_in_two_and_one_alone_is_not_judged(store, monkeypatch):
    monkeypatch.setattr(reward_server, "MOST_BYTES", 2000)
    with serving(store) as (url, _):
        scores = judged(ServedReward(url), *["yes " * 50] * 40, "y" * 3000)
        assert len({round(one.value, 4) for one in scores[:40]}) == 1 and scores[0].value > 0
        assert scores[40].value == 0 and "longer than a request may be" in scores[40].why


def test_who_is_not_there_or_is_no_reward_server_is_named(store):
    with serving(store) as (url, _):
        pass
    with pytest.raises(
        VerifierError, match=r"the reward model at http://127.0.0.1:\d+ gave no answer"
    ):
        judged(ServedReward(url), "4")
    for name in ("http://", "http://user@host", "http://host/path", "http://host:1@0"):
        with pytest.raises(ConfigError, match="write http://HOST:PORT, and @3 behind it"):
            ServedReward(name)


def test_it_is_a_reward_of_chat_and_a_judge_of_stages_by_its_address(store):
    with serving(store) as (url, _):
        reward = named_reward(url, 2.0)
        assert -2 <= judged(reward, "4")[0].value <= 2
        judge = open_judge(url)
        assert judge([(talk("What?", "4")[:1], Message.assistant("4"))]) == pytest.approx(
            [judged(reward, "4")[0].parts["raw"]], abs=1e-5
        )
