"""Docker: its stream, refused settings, and daemons that cannot be used."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.sandboxes import DockerBackend
from agentrl.sandboxes.docker.backend import missing
from agentrl.sandboxes.docker.container import Demultiplexer
from agentrl.sandboxes.docker.daemon import Daemon, unreachable
from agentrl.sandboxes.docker.owner import Owner
from agentrl.sandboxes.supervisor.frames import FrameError

REPO = Path(__file__).resolve().parents[3]
SOCKET = "/var/run/docker.sock"


def piece(stream, data):
    return struct.pack(">BxxxI", stream, len(data)) + data


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40))),
    st.lists(st.integers(1, 20), min_size=1),
)
def test_the_stream_is_taken_apart_however_it_is_cut(pieces, cuts):
    data = b"".join(piece(*row) for row in pieces)
    streams, out, at, turn = Demultiplexer(), b"", 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        out += streams.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert out == b"".join(data for stream, data in pieces if stream == 1)
    assert bytes(streams.stderr) == b"".join(data for stream, data in pieces if stream == 2)


@given(st.binary(min_size=8, max_size=40))
def test_a_stream_that_is_none_is_refused(data):
    if data[0] in (1, 2) and data[1:4] == b"\0\0\0":
        return
    with pytest.raises(FrameError):
        Demultiplexer().feed(data)


def test_bad_settings_are_refused_before_anything_runs():
    for options, match in (
        ({"network": "host"}, "network='host'"),
        ({"url": "ssh://me@there"}, "ssh -nNT -L"),
        ({"url": "unix:///a,npipe://b"}, "npipe"),
        ({"url": "tcp://[::1"}, "write unix:///path"),
        ({"url": " , "}, "names no daemon"),
        ({"lifetime_s": 0}, "lifetime_s=0"),
        ({"userns": "private"}, "userns='private' is unknown"),
    ):
        with pytest.raises(ConfigError, match=match):
            DockerBackend(**options)


def test_a_daemon_that_cannot_be_reached_is_told_with_its_fix(tmp_path):
    assert "start it with" in unreachable(f"unix://{tmp_path}/none")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert "start it with" in unreachable(f"tcp://127.0.0.1:{free.getsockname()[1]}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "shut"))
        listener.listen()
        os.chmod(tmp_path / "shut", 0)
        os.chmod(tmp_path, 0o711)
        code = (
            "import os\nif os.geteuid() == 0: os.setresuid(23456, 23456, 23456)\nfrom"
            " agentrl.sandboxes.docker.daemon import"
            f" unreachable\nprint(unreachable('unix://{tmp_path}/shut'))"
        )
        preload = "import docker, agentrl.sandboxes.docker.daemon\n"
        done = subprocess.run(
            [sys.executable, "-c", preload + code], cwd=REPO, capture_output=True, text=True
        )
    if tmp_path.parent.stat().st_mode & 0o001:
        assert "usermod -aG docker" in done.stdout, done


def test_what_a_daemon_says_comes_with_its_remedy():
    daemon = Daemon(f"unix://{SOCKET}", Owner.me())
    text = daemon._sentence("creating", RuntimeError("write /x: no space left on device"))
    assert "docker system prune" in text


def test_an_image_that_somebody_named_is_not_one_that_we_build(docker, monkeypatch):
    monkeypatch.setenv("AGENTRL_DOCKER_IMAGE", "agentrl-test-none")
    assert "docker pull agentrl-test-none" in (missing() or "")
    monkeypatch.setenv("AGENTRL_DOCKER_IMAGE", "agentrl-agent")
    assert missing() is None
    monkeypatch.setenv("AGENTRL_DOCKER_URL", ",")
    assert "names no daemon" in (missing() or "")
