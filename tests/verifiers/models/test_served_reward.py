"""Versions of a reward model: published, compared, served over HTTP, watched, withdrawn."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from helpers import make_task, wait_for
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import ranked_pairs, serving, talk

from agentrl.errors import ConfigError, ContractError, VerifierError
from agentrl.rollout.blame import CERTAIN
from agentrl.trainers.offline.sampling import Replies, open_judge
from agentrl.types import EndReason, Message, ToolCall
from agentrl.verifiers.base import Submission, grade
from agentrl.verifiers.models import reward_service, served_reward
from agentrl.verifiers.models.batches import Batches
from agentrl.verifiers.models.heads import Heads, clipped
from agentrl.verifiers.models.named import named_reward
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.reward_service import (
    FairQueue,
    RewardServer,
    RewardStore,
    http_protocol,
    read_request,
)
from agentrl.verifiers.models.served_reward import ServedReward, forget_versions


@pytest.fixture(autouse=True)
def _new_process():
    forget_versions()


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


def test_a_served_model_says_what_it_says_in_process(store, models):
    answers, long = ("4", "yes, please"), "word " * 600
    here = RewardModel.load(models[0], bound=clipped(-3, 3))
    with serving(store) as (url, _):
        there = ServedReward(url, bound=clipped(-3, 3), max_batch=2)
        ours, theirs = judged(here, *answers, long), judged(there, *answers, long)
        assert [one.value for one in theirs] == pytest.approx([one.value for one in ours], abs=1e-5)
        assert theirs[2].why == ours[2].why and theirs[2].parts["too_long"] == 1.0
        assert theirs[0].parts["reward_model_version"] == 1.0
        call = ToolCall("say", {"text": "yes"})
        talked = (*talk("a", "b")[:1], Message.assistant("", call), Message.tool("yes", call))
        assert asyncio.run(there.score(talked)) == pytest.approx(
            asyncio.run(here.score(talked)), abs=1e-5
        )


def test_one_conversation_that_cannot_be_scored_fails_alone(store, monkeypatch):
    broken = RewardModel.heads

    async def heads(self, messages):
        if messages[-1].content == "nan":
            return Heads((math.nan,))
        return await broken(self, messages)

    with serving(store) as (url, _):
        monkeypatch.setattr(RewardModel, "heads", heads)
        verifier = ServedReward(url)

        async def everything():
            texts = ("nan", "\ud800 no", "yes")
            asked = (verifier.score(talk("What?", text)) for text in texts)
            return await asyncio.gather(*asked, return_exceptions=True)

        nan, surrogate, fine = asyncio.run(everything())
    assert "not finite" in str(nan) and isinstance(surrogate, VerifierError)
    assert math.isfinite(fine)


def version(verifier):
    return judged(verifier, "4")[0].parts["reward_model_version"]


def test_all_verifiers_of_an_address_have_one_version_until_it_is_withdrawn(store, models):
    with serving(store) as (url, said):
        early = ServedReward(url)
        store.publish(models[1], anyway=True)
        others = [ServedReward(f"{url}/"), named_reward(url), named_reward(url, 2.0)]
        assert [version(one) for one in (early, *others)] == [1, 1, 1, 1]
        forget_versions()
        late, named = ServedReward(url), ServedReward(f"{url}/v1")
        assert [version(one) for one in (early, late, named)] == [1, 2, 1]
        assert judged(early, "4")[0].value != judged(late, "4")[0].value
        assert said == ["version 2 is served now"]
        store.rollback("it likes long answers")
        for _ in range(2):
            with pytest.raises(ContractError, match=r"version 2 was withdrawn \(it likes long"):
                judged(late, "4")
        assert version(early) == 1 == version(ServedReward(url)), "who begins then, begins anew"
        with pytest.raises(ConfigError, match="has no version 9: it has 1, 2"):
            ServedReward(f"{url}/v9")
        with pytest.raises(ConfigError, match=r"version 2 at .* was withdrawn"):
            ServedReward(f"{url}/v2")


def test_another_model_under_the_same_number_is_refused(store, models, tmp_path):
    with serving(store) as (url, _):
        verifier = ServedReward(url)
        judged(verifier, "4")
        port = int(url.rpartition(":")[2])
    other = RewardStore(tmp_path / "other")
    other.publish(models[1], ranked_pairs())
    with serving(other, port=port), pytest.raises(ContractError, match="another store is served"):
        judged(verifier, "4")


def test_a_new_version_that_cannot_be_loaded_leaves_the_old_one_serving(store, models):
    store.publish(models[1], anyway=True)
    (store.folder / "versions" / "2" / "model" / "config.json").write_text("{}")
    store.rollback("for the start")
    with serving(store) as (url, said):
        (store.folder / "withdrawn.json").unlink()
        for _ in range(3):
            assert post(url, {"conversations": [ONE]})[1]["version"] == 1
            forget_versions()
            assert version(ServedReward(url)) == 1
    assert len(said) == 1 and "its files have changed" in said[0], "tried once a minute"


def test_a_loading_version_keeps_nobody_waiting(store, models, monkeypatch):
    load, begun, go_on = RewardStore.load, threading.Event(), threading.Event()

    def slowly(self, number):
        begun.set()
        assert number == 1 or go_on.wait(30)
        return load(self, number)

    monkeypatch.setattr(RewardStore, "load", slowly)
    with serving(store) as (url, said):
        store.publish(models[1], anyway=True)
        begun.clear()
        assert post(url, {"conversations": [ONE]})[1]["version"] == 1 and begun.wait(30)
        assert post(url, {"conversations": [ONE]})[1]["version"] == 1 and not said
        go_on.set()
        wait_for(lambda: post(url, {"conversations": [ONE]})[1]["version"] == 2)


def test_scores_that_move_away_are_told_once_and_those_beyond_stand_in_every_score(store):
    with serving(store, window=200) as (url, said):
        model = ServedReward(url)
        low, high = min(store.served().scores), max(store.served().scores)
        for _ in range(7):
            scores = judged(model, *["zzz " * 60] * 60)
        raw = scores[0].parts["raw"]
        assert {one.parts["reward_model_beyond"] for one in scores} == {
            float(not low <= raw <= high)
        }
        (row,) = model.status()["versions"]
        assert row["version"] == 1 and row["scored"] == 420 and row["psi"] > 0.25
    assert len([one for one in said if "PSI" in one]) == 1


def test_a_key_is_asked_for(store, monkeypatch):
    with serving(store, key="secret") as (url, _):
        monkeypatch.delenv("AGENTRL_REWARD_KEY", raising=False)
        with pytest.raises(ConfigError, match=r"send the server's key.*set AGENTRL_REWARD_KEY"):
            ServedReward(url)
        assert post(url, {"conversations": [ONE]}, authorization="Bearer other")[0] == 401
        monkeypatch.setenv("AGENTRL_REWARD_KEY", "secret\n")
        assert version(ServedReward(url)) == 1
        monkeypatch.setenv("AGENTRL_REWARD_KEY", "sécret")
        with pytest.raises(ConfigError, match="AGENTRL_REWARD_KEY must be printable ASCII"):
            ServedReward(url).status()


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
    b'{"conversations": [[{"role": "user", "content": 5}]]}': "must be texts",
    b'{"conversations": [[{"role": "user", "content": "x", "reasoning": 5}]]}': "must be texts",
    b'{"conversations": [[{"role": "assistant", "content": "", "tool_calls": [{"name": "a",'
    b' "arguments": [1]}]}]]}': "must be an object",
    b'{"conversations": [[{"role": "user", "content": "x", "\\ud800": 1}]]}': "a list of messages",
    b'{"conversations": [[{"role": "user"}]]}': "a list of messages",
    b'{"conversations": [[{"role": "user", "content": "x"}]], "version": true}': "version must be",
    b'{"conversations": [[{"role": "user", "content": "x"}]], "version": 0}': "version must be",
    b'{"conversations": [[{"role": "user", "content": "x"}]], "version": 1' + b"0" * 400 + b"}": (
        "version must be"
    ),
}


def test_what_is_no_request_is_a_sentence_and_the_server_lives_on(store):
    with serving(store) as (url, _):
        for body, why in BAD.items():
            status, found = post(url, body)
            assert status == 400 and why in found["error"], body[:60]
        assert post(url, b"x" * (reward_service.MAX_BODY_BYTES + 1))[0] == 413
        assert post(url, {"conversations": [ONE]})[0] == 200


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "god"])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": st.text(max_size=5) | VALUES},
    optional={"reasoning": VALUES, "name": VALUES, "tool_calls": st.lists(VALUES, max_size=2)},
)
BODIES = st.fixed_dictionaries(
    {"conversations": st.lists(st.lists(MESSAGES, max_size=3), max_size=3)},
    optional={"version": VALUES},
)


@given(BODIES)
def test_no_body_is_read_into_anything_but_messages(body):
    roles = {"user", "assistant", "tool", "system"}
    try:
        conversations, wanted = read_request(copy.deepcopy(body))
    except reward_service.RequestRefused as refused:
        assert refused.status == 400
    else:
        assert all(m["role"] in roles for one in body["conversations"] for m in one)
        assert all(type(m.content) is str for one in conversations for m in one)
        assert wanted is None or wanted >= 1


def test_a_good_body_is_read():
    assert read_request({"conversations": [ONE]}) == ([talk("hi", "yes")], None)


def test_a_batch_of_too_many_bytes_is_cut_in_two_and_one_alone_is_not_judged(store, monkeypatch):
    monkeypatch.setattr(reward_service, "MAX_BODY_BYTES", 2000)
    with serving(store) as (url, _):
        scores = judged(ServedReward(url), *["yes " * 50] * 40, "y" * 3000)
        assert len({round(one.value, 4) for one in scores[:40]}) == 1 and scores[0].value > 0
        assert scores[40].value == 0 and "longer than a request may be" in scores[40].why


def test_who_is_not_there_or_is_no_reward_server_is_named(store):
    with serving(store) as (url, _):
        pass
    forget_versions()
    with pytest.raises(ConfigError, match=r"no reward model answers at http://127.0.0.1:\d+"):
        ServedReward(url)
    for name in ("http://", "http://user@host", "http://host/path", "http://host:1/v0"):
        with pytest.raises(ConfigError, match="write http://HOST:PORT, or http://HOST:PORT/v3"):
            ServedReward(name)
    with pytest.raises(ConfigError, match=r"write http://127\.0\.0\.1:8100"):
        named_reward("127.0.0.1:8100")
    with pytest.raises(ConfigError, match="is a store of reward models: serve it"):
        named_reward(str(store.folder))


def test_a_server_that_is_away_is_waited_for(store, monkeypatch):
    with serving(store) as (url, _):
        verifier = ServedReward(url)
        before, port = judged(verifier, "4"), int(url.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool, pytest.warns(RuntimeWarning, match="waiting for it"):
        asked = pool.submit(judged, verifier, "4")
        time.sleep(2.5)
        with serving(store, port=port):
            assert asked.result(60)[0].value == pytest.approx(before[0].value)
    monkeypatch.setattr(served_reward, "PATIENCE_S", 0.0)
    with pytest.raises(ContractError, match=r"did not answer for 0 s .* --resume goes on"):
        judged(verifier, "4")


def test_a_server_that_is_slow_or_broken_is_never_the_agents_fault(store, monkeypatch):
    async def no_memory(self, messages):
        raise VerifierError("the reward model failed: out of memory")

    with serving(store) as (url, _):
        slow, broken = ServedReward(url, timeout_s=0.2), ServedReward(url)
        monkeypatch.setattr(RewardModel, "heads", no_memory)
        with pytest.raises(VerifierError, match="out of memory") as failed:
            judged(broken, "4")
        assert isinstance(failed.value.__cause__, CERTAIN)
        monkeypatch.setattr(RewardServer, "score", _fails)
        with pytest.raises(VerifierError, match="out of memory") as failed:
            judged(broken, "4")
        assert isinstance(failed.value.__cause__, CERTAIN)
        monkeypatch.setattr(RewardServer, "score", _too_slow)
        monkeypatch.setattr(served_reward, "PATIENCE_S", 0.0)
        with pytest.raises(ContractError, match="did not answer for 0 s"):
            judged(slow, "4")


def test_versions_that_load_at_once_are_all_served(store, models):
    for _ in range(4):
        store.publish(models[1], anyway=True)
    with serving(store) as (url, _):
        with ThreadPoolExecutor(5) as pool:
            asked = [
                pool.submit(post, url, {"conversations": [ONE], "version": number})
                for number in range(1, 6)
            ]
            found = [one.result(60) for one in asked]
        assert [(status, row["version"]) for status, row in found] == [
            (200, number) for number in range(1, 6)
        ]
        forget_versions()
        rows = ServedReward(url).status()["versions"]
        assert sum("scored" in row for row in rows) == reward_service.KEPT


def test_a_batch_that_fails_is_tried_one_by_one(store, monkeypatch):
    forward = Batches.forward

    def alone(self, rows):
        if len(rows) > 1:
            raise RuntimeError("out of memory")
        return forward(self, rows)

    with serving(store) as (url, _):
        monkeypatch.setattr(Batches, "forward", alone)
        scores = judged(ServedReward(url), "4", "yes", "no")
    assert len({one.parts["raw"] for one in scores}) == 3


def raw_request(url, *lines, body=b"", wait_s=0.0):
    """The status of a request that is written to a socket as it is."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        time.sleep(wait_s)
        connection.sendall(body)
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize("key", ["", "secret"])
def test_requests_of_web_pages_are_refused(store, key):
    """A page may send its own Origin, or reach a loopback port by a host name of its own."""
    with serving(store, key=key) as (url, _):
        address = url.removeprefix("http://")
        allowed = f"authorization: Bearer {key}"

        def asked(*headers):
            return raw_request(url, "GET /status HTTP/1.1", allowed, *headers)

        assert asked(f"host: {address}") == 200
        assert asked(f"host: localhost:{address.rpartition(':')[2]}") == 200
        assert asked(f"host: {address}", f"origin: {url}") == 200
        for host in ("evil.example", f"127.0.0.1.evil.example:{address.rpartition(':')[2]}", ""):
            assert asked(f"host: {host}") == 403
        for origin in ("http://evil.example", "null", f"{url}.evil.example", "http://[", ""):
            assert asked(f"host: {address}", f"origin: {origin}") == 403


def test_a_body_that_never_ends_is_given_up(store, monkeypatch):
    monkeypatch.setattr(reward_service, "BODY_TIMEOUT_S", 0.3)
    with serving(store) as (url, _):
        post_head = ("POST /score HTTP/1.1", f"host: {url.removeprefix('http://')}")
        began = time.monotonic()
        assert raw_request(url, *post_head, "content-length: 100", body=b"{", wait_s=0.1) == 408
        assert time.monotonic() - began < 20
        assert post(url, {"conversations": [ONE]})[0] == 200


def test_buffered_bytes_are_bounded_and_a_busy_server_is_waited_for(store, monkeypatch):
    with serving(store) as (url, _):
        verifier = ServedReward(url)
        before = judged(verifier, "4")[0].value
        monkeypatch.setattr(reward_service, "MAX_BUFFERED_BYTES", 4000)
        address = url.removeprefix("http://")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as held:
            head = f"POST /score HTTP/1.1\r\nhost: {address}\r\ncontent-length: 5000\r\n\r\n"
            held.sendall(head.encode() + b" " * 3950)  # never whole
            wait_for(lambda: post(url, {"conversations": [ONE]})[0] == 503)
        wait_for(lambda: post(url, {"conversations": [ONE]})[0] == 200)
        monkeypatch.setattr(reward_service, "MAX_BUFFERED_BYTES", 10)
        with ThreadPoolExecutor(1) as pool, pytest.warns(RuntimeWarning, match="waiting for it"):
            asked = pool.submit(judged, verifier, "4")
            time.sleep(1.5)
            monkeypatch.setattr(reward_service, "MAX_BUFFERED_BYTES", 1 << 20)
            assert asked.result(60)[0].value == pytest.approx(before)


def test_clients_are_served_in_turn(store, monkeypatch):
    """A client with many requests does not keep another one waiting until all are scored."""
    heads, order, entered = RewardModel.heads, [], threading.Event()

    async def slowly(self, messages):
        order.append(messages[-1].content)
        entered.set()
        await asyncio.sleep(0.05)
        return await heads(self, messages)

    def conversation(text):
        return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]

    with serving(store) as (url, _), ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(RewardModel, "heads", slowly)
        many = {"conversations": [conversation("many")] * 128}
        asked = [pool.submit(post, url, many, **{"x-agentrl-client": "a"}) for _ in range(4)]
        assert entered.wait(30)
        time.sleep(0.2)
        one = {"conversations": [conversation("one")]}
        assert post(url, one, **{"x-agentrl-client": "b"})[0] == 200
        finished = sum(each.done() for each in asked)
        assert [each.result(60)[0] for each in asked] == [200] * 4
    assert finished < 4 and order.index("one") < len(order) / 2


def test_a_request_that_is_given_up_passes_its_turn_on():
    asyncio.run(give_up_a_turn())


async def give_up_a_turn():
    queue, done = FairQueue(), []

    async def work(name):
        async with queue.turn(name):
            await asyncio.sleep(0.01)
            done.append(name)

    first = asyncio.create_task(work("a"))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(work(name)) for name in ("b", "c", "b")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(first, *tasks, return_exceptions=True)
    assert done == ["a", "c", "b"] and not queue._is_busy


async def _too_slow(self, body, client):
    await asyncio.sleep(1)


async def _fails(self, body, client):
    raise VerifierError("out of memory")


def test_it_is_a_reward_of_chat_and_a_judge_of_stages_by_its_address(store):
    with serving(store) as (url, _):
        reward = named_reward(url, 2.0)
        assert -2 <= judged(reward, "4")[0].value <= 2
        judge = open_judge(url)
        assert judge(
            [(talk("What?", "4")[:1], Message.assistant("4"))], Replies()
        ) == pytest.approx([judged(reward, "4")[0].parts["raw"]], abs=1e-5)


def test_a_client_that_never_ends_its_headers_is_hung_up_on():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            answer, log_level="warning", http=http_protocol(0.5), lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            address, request = listener.getsockname(), b"GET / HTTP/1.1\r\nHost: x\r\n"
            with socket.create_connection(address, timeout=30) as slow:
                slow.sendall(request)
                assert slow.recv(100) == b""
            with socket.create_connection(address, timeout=30) as quick:
                for _ in range(2):  # a second request on the same connection is timed as well
                    quick.sendall(request + b"\r\n")
                    assert quick.recv(100).startswith(b"HTTP/1.1 204")
                quick.sendall(request)
                assert quick.recv(100) == b""
        finally:
            server.should_exit = True
            thread.join(30)
