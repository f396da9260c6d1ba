"""`agentrl reward` as a user types it: a store, a real server, and what it is told."""

from __future__ import annotations

import signal
import socket
import sys

from helpers import last_json, process, run_cli, wait_for
from preference_cases import planted_pairs, write_rows
from reward_cases import reward_folder


def test_a_store_is_published_served_asked_and_rolled_back(tmp_path):
    one, two = (reward_folder(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2)))
    store, pairs = tmp_path / "rewards", write_rows(tmp_path / "pairs.jsonl", planted_pairs())
    missing = run_cli("reward", "publish", one, store)
    assert missing.returncode == 2 and "give --pairs FILE with the first one" in missing.stderr
    assert not store.exists()
    first = run_cli("reward", "publish", one, store, "--pairs", pairs)
    assert first.returncode == 0 and "published version 1: ranks 0." in first.stdout, first.stderr
    assert f"serve it: agentrl reward serve {store}" in first.stdout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("reward", "serve", str(store), "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with process(sys.executable, "-m", "agentrl.cli", *words) as served:
        assert b"version 1 of" in served.stdout.readline()
        status = last_json(run_cli("reward", "status", url, "--json").stdout)
        assert (status["served"], len(status["versions"])) == (1, 1)
        taken = run_cli(*words)
        assert taken.returncode == 2 and "choose another --port" in taken.stderr
        second = run_cli("reward", "publish", two, store, "--anyway", "--json")
        assert last_json(second.stdout)["version"] == 2
        assert "version 2  served: scored 0" in run_cli("reward", "status", url).stdout
        back = run_cli("reward", "rollback", store, "--why", "it likes long answers")
        assert "withdrew version 2; version 1 is served" in back.stdout
        said = run_cli("reward", "status", url).stdout
        assert "version 2  withdrawn (it likes long answers)" in said
        served.send_signal(signal.SIGINT)
        wait_for(lambda: served.poll() is not None)
    kept = last_json(run_cli("reward", "status", store, "--json").stdout)
    assert kept["served"] == 1
    assert [one["withdrawn"] for one in kept["versions"]] == [None, "it likes long answers"]


def test_other_machines_are_let_in_only_with_a_key(tmp_path):
    said = run_cli("reward", "serve", tmp_path, "--host", "0.0.0.0", AGENTRL_REWARD_KEY="")
    assert said.returncode == 2 and "set AGENTRL_REWARD_KEY to a secret" in said.stderr


def test_an_address_where_a_folder_is_asked_for_is_named():
    said = run_cli("reward", "rollback", "http://127.0.0.1:8100", "--why", "x")
    assert said.returncode == 2 and "is an address: give the folder" in said.stderr
