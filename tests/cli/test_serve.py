"""`agentrl serve` and the sentences of those who have no vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from conftest import require
from helpers import below, process, run_cli, tiny_model_folder, wait_for
from run_cases import settings

from agentrl.cli import serve as command
from agentrl.cli.options import refuse_unused
from agentrl.engines import vllm
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.offline.sampling import Replies, SampledAnswer, open_judge, revise_answers
from agentrl.trainers.run import Run
from agentrl.types import Message

HOW = "vLLM is not installed: pip install 'agentrl\\[vllm\\]' on a machine with a GPU, `make setup"


def test_without_vllm_every_way_to_it_says_how_to_get_it(monkeypatch, tmp_path, model):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=HOW):
        command.serve(str(tiny_model_folder()))
    plan = EvalPlan(factory("calc-v0"), f"vllm:{tiny_model_folder()}", limit=1, sandbox="process")
    with pytest.raises(ConfigError, match=HOW):
        evaluate(plan)
    with pytest.raises(ConfigError, match=HOW):
        Run(settings(model, engine={"name": "vllm"}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_other_machines_are_let_in_only_with_a_key(monkeypatch, host):
    monkeypatch.setattr(vllm, "missing", lambda: None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set VLLM_API_KEY to a secret"):
        command.serve(str(tiny_model_folder()), host=host)


def test_a_server_has_a_process_in_any_case(monkeypatch):
    monkeypatch.setattr(vllm, "missing", lambda: None)
    with pytest.raises(ConfigError, match="--engine-option process=false does nothing here"):
        command.serve(str(tiny_model_folder()), engine_option=["process=false"])


def test_a_context_that_the_model_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len=513 exceeds the context length 512"):
        command._arguments(str(tiny_model_folder()), command.vllm_settings(["max_model_len=513"]))


@pytest.mark.parametrize(
    ("policy", "kind", "option", "given"),
    [
        ("hf:m", "vllm:", "--engine-option", ["kv_cache_gib=1"]),
        ("oracle", "vllm:", "--engine-option", ["dtype=auto"]),
        ("vllm:m", "openai:", "--policy-option", ["top_p=0.9"]),
    ],
)
def test_options_that_do_nothing_are_refused_by_name(policy, kind, option, given):
    with pytest.raises(
        ConfigError, match=f"{option} {given[0]} does nothing for --policy {policy}"
    ):
        refuse_unused(policy, kind, option, given)
    refuse_unused(policy, kind, option, None)
    refuse_unused(f"{kind}m", kind, option, given)


def test_options_go_where_they_belong():
    assert command.vllm_settings(["max_model_len=64"]).max_model_len == 64
    assert command.vllm_settings(None).name == "vllm"


def test_tool_calls_are_read_in_the_format_of_the_model():
    hermes = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert command._tool_calls(str(tiny_model_folder()), "auto") == hermes


def test_a_format_that_vllm_does_not_read_is_said(capsys):
    assert command._tool_calls(str(tiny_model_folder()), "atem") == []
    assert "no reader for tool calls of the format 'atem'" in capsys.readouterr().err


def post(url: str, body: dict) -> dict:
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)


@contextmanager
def its_family(served):
    """Ctrl-C at the end: the server and all that it started are gone then."""
    family = {served.pid}
    try:
        yield
        family = below([served.pid])
        assert len(family) > 1
        served.send_signal(signal.SIGINT)
        wait_for(lambda: not below(family))
    finally:
        for pid in below(family):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_served_model_gives_token_ids_and_their_logprobs(tmp_path):
    require("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "agentrl.cli", "serve", str(tiny_model_folder())]
    words += ["--port", str(port), "--engine-option", "kv_cache_gib=0.0625"]
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    log = (tmp_path / "log").open("wb")
    env = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}
    with log, process(*words, stderr=log, env=env) as served, its_family(served):
        wait_for(up, timeout_s=1200)
        body = {"model": str(tiny_model_folder()), "prompt": [5, 6, 7], "max_tokens": 4}
        body |= {"logprobs": 0, "return_token_ids": True, "seed": 3, "temperature": 0.7}
        (choice,) = post(f"{url}/v1/completions", body)["choices"]
        policy = f"openai:{tiny_model_folder()}@{url}/v1"
        words = ("eval", "calc-v0", "--policy", policy, "--limit", "3", "--out", tmp_path / "out")
        words += ("--policy-option", "tokens=true", "--temperature", "0.7", "--sandbox", "process")
        evaluated = run_cli(*words, OPENAI_API_KEY="")
        judged = judgement(policy, tmp_path)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    assert evaluated.returncode == 0, evaluated.stderr
    episodes = list(read_episodes(tmp_path / "out" / "episodes.jsonl").values())
    assert len(episodes) == 3
    assert judged == [None], "a random model judges nothing"
    for episode in episodes:
        assert episode.trajectories and episode.counts.sampled_tokens > 0
        assert gap(episode.trajectories, temperature=0.7) < 1e-3


def judgement(policy, folder):
    """What a constitution's model says of an answer, of which it makes nothing."""
    path = folder / "constitution.toml"
    path.write_text(
        f"model = {json.dumps(policy)}\n[[principles]]\nname = 'kind'\nasks = 'Is it kind?'\n"
    )
    prompt, said = (Message.user("hi"),), Message.assistant("yes")
    judged = open_judge(str(path))([(prompt, said)], Replies())
    with pytest.raises(UserError, match="the model that revises failed at 1 of 1 answers"):
        revise_answers([[SampledAnswer(prompt, said, True)]], str(path), Replies())
    return judged


def gap(branches, temperature):
    """The largest difference between recorded log-probabilities and those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder(), dtype=torch.float32)
    largest = 0.0
    for branch in branches:
        ids = torch.tensor([branch.ids])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        scored = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        pairs = zip(branch.mask[1:], branch.logprobs[1:], scored, strict=True)
        largest = max(largest, *(abs(told - ours) for on, told, ours in pairs if on))
    return largest
