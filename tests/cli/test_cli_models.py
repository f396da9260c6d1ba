"""Real models on the command line: which settings there are, and what is said of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from helpers import last_json, tiny_model_folder
from trl_templates import trl_tokenizer


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    trl_tokenizer("gemma").save_pretrained(tmp_path / "gemma")
    return f"hf:{tmp_path / 'gemma'}"


def test_check_of_a_model_says_what_its_template_does(run, gemma) -> None:
    code, out, _ = run("check", gemma, "--json")
    found = last_json(out)
    assert code == 0
    assert found == {
        "model": gemma.removeprefix("hf:"),
        "parser": "hermes",
        "on_rewrite": "branch",
        "tool_role": "user",
        "rewrites_history": False,
        "shows_tools": False,
        "round_trip": True,
        "problems": [],
    }
    code, out, _ = run("check", gemma)
    assert code == 0
    assert "tool results       as user messages\n" in out
    assert out.endswith("ok      every promise of exact tokens holds\n")


def test_check_exits_1_where_a_promise_is_broken_and_names_a_setting(run, gemma, tmp_path) -> None:
    code, out, _ = run("check", gemma, "--tool-role", "tool", "--json")
    assert code == 1
    (problem,) = last_json(out)["problems"]
    assert "set --tool-role to 'user'" in problem
    trl_tokenizer("qwen3_6").save_pretrained(tmp_path / "qwen")
    code, out, _ = run("check", f"hf:{tmp_path / 'qwen'}", "--parser", "llama_json", "--json")
    assert code == 1
    assert last_json(out)["round_trip"] is False
    assert "set --parser to 'auto'" in last_json(out)["problems"][0]
    code, out, _ = run("check", f"hf:{tmp_path / 'qwen'}", "--on-rewrite", "refuse")
    assert code == 1
    assert "BROKEN  chat template of tokenizer" in out
    assert "on_rewrite='branch'" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--parser", "json"), "--parser 'json' must be auto, hermes"),
        (("--on-rewrite", "drop"), "--on-rewrite 'drop' must be branch, keep or"),
        (("--tool-role", "x"), "--tool-role 'x' must be auto, tool or user"),
        (("--template-option", "thinking"), "--template-option 'thinking': write it as key=value"),
        (("--template", "nope"), "--template 'nope' is neither a shipped template"),
    ],
)
def test_flags_of_a_chat_are_checked(run, flags, sentence) -> None:
    for command in (("check", f"hf:{tiny_model_folder()}"), ("eval", "calc-v0")):
        policy = () if command[0] == "check" else ("--policy", f"hf:{tiny_model_folder()}")
        code, _, err = run(*command, *policy, *flags, *(("--limit", 1) if policy else ()))
        assert code == 2
        assert sentence in err
        assert err.rstrip("\n").count("\n") == 0


def test_eval_takes_the_settings_of_a_chat_and_records_what_was_chosen(run, tmp_path) -> None:
    policy = ("--policy", f"hf:{tiny_model_folder()}", "--limit", "1")
    flags = ("--top-p", "0.9", "--top-k", "5", "--on-rewrite", "keep", "--tool-role", "user")
    code, out, err = run(
        "eval", "calc-v0", *policy, *flags, "--template-option", "x=false", "--json"
    )
    assert code == 0
    assert "chat: parser hermes; tool results as user messages" in err
    assert last_json(out)["chat"] == {
        "parser": "hermes",
        "on_rewrite": "keep",
        "tool_role": "user",
        "template_options": {"x": False},
        "template": "",
    }
    for flag, value in (("--top-p", "0"), ("--top-k", "-1")):
        code, _, err = run("eval", "calc-v0", *policy, flag, value)
        assert code == 2
        assert f"{flag} {value}" in err or f"{flag} {float(value)}" in err
    folder = ("--out", tmp_path / "run")
    assert run("eval", "calc-v0", *policy, *folder)[0] == 0
    code, _, err = run("eval", "calc-v0", *policy, *folder, "--parser", "xml")
    assert code == 2
    assert "holds an evaluation with another chat" in err


def test_train_takes_the_settings_of_a_chat_and_keeps_them(run, tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'env = "calc-v0"\nmodel = "{tiny_model_folder()}"\nsteps = 1\ntasks_per_step = 1\n'
        "group_size = 2\n"
    )
    out = ("--out", tmp_path / "run")
    code, _, err = run("train", config, *out, "--set", "chat.parser=xml")
    assert code == 0
    assert "chat: parser xml" in err
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["chat"]
    assert recorded["parser"] == "xml"
    assert recorded["tool_role"] == "tool"
    code, _, err = run("train", config, *out, "--resume", "--set", "chat.parser=hermes")
    assert code == 2
    assert "is a run with chat.parser='xml', not 'hermes'" in err


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("chat.parser=json", "chat.parser='json' must be auto, hermes"),
        ("chat.on_rewrite=1", "chat.on_rewrite=1 must be branch, keep or refuse"),
        ("chat.role=user", "setting 'chat.role' is unknown"),
        ("top_p=0.9", "a setting of `agentrl eval` alone"),
        ("top_k=5", "a setting of `agentrl eval` alone"),
    ],
)
def test_settings_of_a_chat_are_checked_before_anything_is_loaded(
    run, tmp_path, setting, sentence
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('env = "calc-v0"\nmodel = "/no/such/folder"\n')
    code, _, err = run("train", config, "--set", setting)
    assert code == 2
    assert sentence in err


def test_eval_of_a_training_config_plays_its_held_out_tasks(run, tmp_path) -> None:
    """The model, environment and held-out tasks are the file's; options and --set replace them."""
    config = tmp_path / "run.toml"
    config.write_text(
        f'env = "calc-v0"\nmodel = "{tiny_model_folder()}"\nsteps = 3\n'
        "held_out = {tasks = 2, samples = 2}\n[env_settings]\noperations = 1\n"
    )
    code, out, _ = run("eval", config, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["env"], found["policy"]) == ("calc-v0", f"hf:{tiny_model_folder()}")
    assert (found["n_tasks"], found["budget"]["samples"]) == (2, 2)
    code, out, _ = run("eval", config, "--json", "--limit", "3", "--set", "held_out.samples=1")
    found = last_json(out)
    assert code == 0
    assert (found["n_tasks"], found["budget"]["samples"]) == (3, 1)


def test_eval_of_a_config_checks_settings_of_training_too(run, tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('env = "calc-v0"\nmodel = "/no/such/folder"\ngroup_size = -1\n')
    code, _, err = run("eval", config)
    assert code == 2 and "group_size" in err
