"""The command line: one sentence for bad input, exit codes, and never a traceback."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from cli_cases import ENV
from helpers import children, last_json, process, run_cli, tiny_model_folder, wait_for

from agentrl.cli import train as train_command


def bad_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text(
        '{"id": "a", "instruction": "x"}\n{"id": "b", "instructon": "x"}\n'
    )
    return tmp_path / "bad.jsonl"


def no_tokenizer(tmp_path):
    shutil.copytree(tiny_model_folder(), tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    return tmp_path / "model"


def mine_file(tmp_path):
    (tmp_path / "mine.py").write_text(ENV.replace("ORACLE", "word"))
    return tmp_path / "mine.py"


def syntax_error(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    return tmp_path / "bad.py"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["eval", "calk-v0"], "did you mean 'calc-v0'?"),
        (["check", "chat-v0"], "chat-v0: prompts and reward must be set: --set prompts=FILE"),
        (["check", "calk-v0"], "did you mean 'calc-v0'?"),
        (["eval", "code-v0", "--tasks", bad_line], "bad.jsonl, line 2: field instruct"),
        (["eval", "code-v0", "--tasks", "/no/such.jsonl"], "/no/such.jsonl: there is no such file"),
        (["eval", "calc-v0", "--tasks", "/x", "--limit", "1"], "tasks_file"),
        (["eval", "calc-v0", "--limit", "1", "--policy", "hf:/no/such"], "/no/such does not exist"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", ("hf:{}", no_tokenizer)],
            "has no tokenizer",
        ),
        (["eval", "calc-v0", "--limit", "1", "--k", "4"], "must be from 1 to samples=1"),
        (["eval", "calc-v0", "--limit", "1", "--k", "x"], "--k 'x'"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", "orakel"],
            "--policy 'orakel' is not a policy",
        ),
        (["eval", "calc-v0", "--limit", "1", "--policy", "vllm:/no/such"], "does not exist"),
        (
            ["eval", "calc-v0", "--policy", "hf:m", "--engine-option", "dtype=auto"],
            "--engine-option dtype=auto does nothing for --policy hf:m",
        ),
        (
            ["eval", "calc-v0", "--policy", "vllm:m", "--engine-option", "max_model_len=-1"],
            "--engine-option max_model_len=-1 must be at least 0",
        ),
        (
            ["eval", "calc-v0", "--policy", "vllm:m", "--engine-option", "own_weights=true"],
            "own_weights=True is no setting of 'vllm'",
        ),
        (["demo", "--engine", "vlm"], "name='vlm' must be transformers or vllm"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", "openai:m@ftp://x"],
            "base_url='ftp://x' is no address",
        ),
        (["eval", "calc-v0", "--limit", "1", "--policy", "openai:@http://x"], "model=''"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", "openai:m@http://x", "--price", "1"],
            "--price '1'",
        ),
        (["eval", "calc-v0", "--limit", "1", "--set", "operatoins=3"], "operatoins"),
        (["eval", "calc-v0", "--limit", "1", "--set", "operations"], "write it as key=value"),
        (["eval", "calc-v0", "--limit", "1", "--set", "operations=7"], "operations=7"),
        (["eval", "calc-v0", "--limit", "1", "--split", "dev"], "split='dev'"),
        (["eval", "calc-v0", "--limit", "1", "--temperature", "-1"], "--temperature -1"),
        (["eval", "calc-v0", "--limit", "1", "--out", "/proc/none"], "/proc/none"),
        (
            ["eval", "calc-v0", "--limit", "two"],
            "agentrl: --limit 'two' must be a whole number, as in --limit 8\n",
        ),
        (
            ["eval", "calc-v0", "--temperature", "hot"],
            "'hot' must be a number, as in --temperature 0.7\n",
        ),
        (
            ["eval", "calc-v0", "--limit", "1", "--set", "foo=1"],
            "'foo': its settings are operations=2, largest=99",
        ),
        (
            ["eval", "bugfix-v0", "--limit", "1", "--set", "foo=1"],
            "'foo': its settings are functions, ",
        ),
        (
            ["eval", "bugfix-v0", "--limit", "1", "--set", "functions=x"],
            "functions='x' must be a whole number",
        ),
        (["eval", "calc-v0", "--limt", "1"], "--limt"),
        (["eval", "calc-v0"], "--limit"),
        (
            ["eval", "bugfix-v0", "--limit", "1", "--sandbox", "dokker"],
            "--sandbox 'dokker': did you mean 'docker'?",
        ),
        (
            ["check", "bugfix-v0", "--sandbox", "dokker"],
            "sandbox='dokker' is unknown",
        ),
        (["eval", "bugfix-v0", "--limit", "1", "--split", "dev"], "dev"),
        (["eval", "bugfix-v0", "--limit", "1", "--trust"], "--trust goes with --sandbox process"),
        (["check", ("{}:Env", syntax_error)], "cannot be loaded: SyntaxError"),
        (["check", "nowhere.py:Env"], "'nowhere.py' does not exist"),
        (["check", ("{}", mine_file)], "mine.py:Mine\n"),
        (["check", ("{}:Yours", mine_file)], "mine.py:Mine\n"),
        (["check", ("{}", syntax_error)], "bad.py:ClassName\n"),
        (["check", "nowhere.py"], "'nowhere.py' does not exist"),
        (["check", "calc-v0", "--tasks", "0"], "--tasks '0' must be at least 1\n"),
        (["new", "Bad Name"], "lower-case"),
        (["new", "x", "--out", "/proc/none"], "/proc/none"),
        (["view", "/no/such"], "/no/such does not exist"),
        (["view", ("{}", mine_file)], "mine.py is a file: give the run folder"),
        (["view", ("{}/runs/demo-0", str)], "does not exist: create it with `make demo`\n"),
        (["view", ("{}/runs/demo-3", str)], "does not exist: create it with `make demo SEED=3`\n"),
        (["convert", "nosuch", "a", "b"], "nosuch"),
        (["train", "/no/such.toml"], "/no/such.toml"),
        (["train"], "CONFIG is missing"),
        (["recipes", "grpoo"], "there is no recipe 'grpoo'; did you mean 'grpo'?"),
        (["recipes", "gpro"], "did you mean 'grpo'?"),
        (["check", "hf:"], "the name of the model is empty"),
        (["check", "hf:m", "--parser", "hermess"], "did you mean 'hermes'?"),
        (["eval", "calc-v0", "--limit", "0"], "say how many, as in --limit 100"),
        (["compare", "/no/a", "/no/b"], "/no/a holds no eval.json"),
        (["suite", "/no/such.toml"], "suite /no/such.toml does not exist"),
        (["export", "/no/such", "xml", "x"], "format 'xml' is unknown"),
        (["eval", "calc-v0", "--limit", "2", "--price", "-1,2"], "--price -1,2 must be"),
        (["eval", "calc-v0", "--limit", "2", "--k", "2"], "must be from 1 to samples=1"),
        (["eval", "calc-v0", "--limit", "2", "--user", "noop"], "calc-v0 has no user"),
        (["audit", "calc-v0", "--limit", "0"], "--limit '0' must be at least 1\n"),
        (["nosuch"], "there is no command 'nosuch': choose doctor, "),
        (["evaluate"], "there is no command 'evaluate': did you mean 'eval'?"),
        (["images", "built"], "there is no command 'built': did you mean 'build'?"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, part):
    words = []
    for word in arguments:
        form, make = word if isinstance(word, tuple) else ("{}", word)
        words.append(form.format(make(tmp_path)) if callable(make) else make)
    for extra in ([], ["--json"]):
        code, out, err = run(*words, *extra)
        assert code == 2, (out, err)
        assert part in err and out == ""
        assert err.startswith("agentrl: ") and err.count("\n") == 1 and "Traceback" not in err


def test_the_same_in_a_process_of_its_own():
    out = run_cli("eval", "calk-v0", "--json")
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "agentrl: environment 'calk-v0' is unknown: did you mean 'calc-v0'?\n"


def test_a_broken_machine_is_exit_code_1(run, monkeypatch):
    from agentrl import registry
    from agentrl.errors import SandboxLost

    def broken():
        raise SandboxLost("the host is on fire")

    monkeypatch.setattr(registry, "environment_ids", broken)
    code, out, err = run("list")
    assert (code, out, err) == (1, "", "agentrl: SandboxLost: the host is on fire\n")


def test_help_and_no_command(run):
    code, out, err = run("--help")
    assert code == 0 and "eval" in out
    code, out, err = run()
    assert code in (0, 2) and "eval" in out + err
    code, out, err = run("images")
    assert code == 0 and "build" in out and err == ""


def test_an_interrupt_ends_quietly_and_the_run_can_go_on(tmp_path, bubblewrap):
    before = children()
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "eval",
        "bugfix-v0",
        "--limit",
        "400",
        "--out",
        tmp_path,
        "--json",
    ]
    records = tmp_path / "episodes.jsonl"
    with process(*command, stderr=subprocess.PIPE, text=True) as child:
        wait_for(
            lambda: (
                child.poll() is not None or (records.exists() and records.stat().st_size >= 20_000)
            ),
            200,
        )
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=200)
    found = last_json(out)  # what was played can be used
    assert child.returncode == 130 and err.endswith("agentrl: interrupted\n")
    assert found["stopped"] == "interrupted" and found["n_missing"] == 400 - found["n_episodes"]
    wait_for(lambda: not children() - before)
    done = records.read_bytes().count(b"\n")
    assert 0 < done < 400


def test_training_tells_nobody(monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    with train_command.training_parts():
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    with train_command.training_parts():
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"


def test_a_full_disk_is_one_sentence(run, monkeypatch):
    import errno

    from agentrl.evaluation import run as evaluation

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(evaluation, "evaluate", full)
    code, _, err = run("eval", "calc-v0", "--limit", "1")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "the disk is full" in err
