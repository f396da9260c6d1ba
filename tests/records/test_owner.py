"""A run folder has one owner, and the second process is told so in one sentence."""

import os
import subprocess
import sys

import pytest
from helpers import Echo

from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.owner import LOCK, owned

HOLD = """
import sys
from pathlib import Path
from agentrl.records.owner import owned
with owned(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_owner_is_refused_by_one_sentence(tmp_path):
    with holder(tmp_path) as first:
        with pytest.raises(ConfigError, match=f"process {first.pid}: wait"), owned(tmp_path):
            pass
        with pytest.raises(ConfigError, match="in use by process"):
            evaluate(EvalPlan(Echo, limit=2, sandbox="process", out=tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        first.stdin.close()
    refused = pytest.raises(ConfigError, match=f"process {os.getpid()}")
    with owned(tmp_path), refused, owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_holds_nothing(tmp_path):
    with holder(tmp_path) as first:
        first.kill()
    with owned(tmp_path):
        pass
