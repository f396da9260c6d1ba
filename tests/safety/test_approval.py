"""What a rule asks: a script, a person or a webhook answers, and training waits for nobody."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from helpers import call, observations, play_one, says, script
from policy_cases import Till, played, policy

from agentrl.errors import ConfigError
from agentrl.safety.approval import AtTerminal, Request, ScriptedApprover, Webhook, open_approver
from agentrl.safety.guard import PolicyGuard
from agentrl.safety.policy import Rule
from agentrl.specs import GuardSpec

ASK = Rule(id="costs", decision="ask", tools=("pay",), reason="it costs")


def test_a_script_answers_what_a_rule_asks():
    for answer, paid in (("approve", 3), ("deny", 0)):
        Till.paid = 0
        table = {"kind": "scripted", "answers": {"pay": answer}}
        episode = played(policy(ASK, approval=table), call("pay", amount=3), deterministic=True)
        assert (Till.paid, episode.events[0].by) == (paid, f"script: {answer}")
    assert observations(episode)[0] == "error: denied: it costs"
    assert played(policy(ASK), call("pay", amount=3)).events[0].by == "nobody to ask"


def test_training_waits_for_nobody():
    with pytest.raises(ConfigError, match="not for training"):
        GuardSpec.of(policy(ASK, approval={"kind": "terminal"}), deterministic=True)
    with pytest.raises(ConfigError, match="url is missing"):
        open_approver({"kind": "webhook"}, "policy p")
    with pytest.raises(ConfigError, match=r"approval.kind='phone'"):
        open_approver({"kind": "phone"}, "policy p")


def test_a_person_sees_the_truth_and_anything_but_yes_denies(capsys):
    lines = iter(["y\n", "maybe\n", ""])
    guard = lambda: PolicyGuard(policy(ASK), approver)  # noqa: E731
    approver = AtTerminal(lambda: next(lines))
    calls = [says(call("pay", amount=amount)) for amount in (1, 2, 4)]
    episode = play_one(Till, script(*calls, says(content="yes")), guard=guard)
    assert Till.paid == 1
    assert [event.by for event in episode.events] == [
        "terminal: y",
        "terminal: maybe",
        "terminal: no answer",
    ]
    assert "pay(amount=4), effect irreversible" in capsys.readouterr().err


class _Desk(BaseHTTPRequestHandler):
    """Answers as `said` says."""

    said = b'{"decision": "approve"}'
    asked: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked.append(json.loads(body))
        if self.said == b"slow":
            time.sleep(1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args):
        pass


def test_a_webhook_that_does_not_answer_has_denied_and_that_is_said():
    server = HTTPServer(("127.0.0.1", 0), _Desk)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        wanted = {
            b'{"decision": "approve"}': ("allow", "webhook: approve"),
            b'{"decision": "deny"}': ("deny", "webhook: deny"),
            b"[]": ("deny", "webhook gave no decision"),
            b"{": ("deny", "webhook did not answer"),
            b"slow": ("deny", "webhook did not answer"),
        }
        for said, (verdict, by) in wanted.items():
            _Desk.said = said
            table = {"kind": "webhook", "url": url, "timeout_s": 0.3}
            (event,) = played(policy(ASK, approval=table), call("pay", amount=1)).events
            assert (event.verdict, event.by.startswith(by)) == (verdict, True), event
        assert _Desk.asked[0]["tool"] == "pay" and "amount=1" in _Desk.asked[0]["preview"]
    finally:
        server.shutdown()
        server.server_close()
    table = {"kind": "webhook", "url": "http://127.0.0.1:1/", "timeout_s": 0.3}
    (event,) = played(policy(ASK, approval=table), call("pay", amount=1)).events
    assert event.verdict == "deny" and "did not answer" in event.by


def test_a_scripted_approver_takes_the_first_match():
    import asyncio

    request = Request("", "pay", {}, "costs", "t")
    for answers, wanted in (
        ({"p*": "approve", "*": "deny"}, "approve"),
        ({"x": "approve"}, "deny"),
    ):
        assert asyncio.run(ScriptedApprover(answers).answer(request)).answer == wanted
    assert Webhook("http://127.0.0.1:1/").deterministic is False
