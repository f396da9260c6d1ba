"""What tests of commands share: a command called in this process, and an environment in a file."""

import sys

import pytest
from cli_cases import ENV

from agentrl.cli import app as cli


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentrl", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ENV.replace("ORACLE", "word"))
    return f"{file}:Mine"
