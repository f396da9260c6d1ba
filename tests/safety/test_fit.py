"""What a policy and an environment say of each other before the first episode."""

import pytest
from helpers import Echo, last_json, run_cli
from typer.testing import CliRunner

from agentrl.calls import Guard
from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.evaluation.recorded_guard import _AsRecorded
from agentrl.evaluation.run import EvalPlan, EvalProgress, evaluate
from agentrl.safety.loading import idle_patterns, refuse_unfit
from agentrl.safety.policy import Rule, SafetyPolicy
from agentrl.tools import tool

ALLOW = '[[rules]]\nid = "all"\ndecision = "allow"\n'


class Shell(Echo):
    id = "shell-v0"
    needs_sandbox = True

    @tool(effect="write", shell="command")
    async def sh(self, command: str) -> str:
        """Run."""
        return command

    @tool(effect="write", reversible=True)
    async def save(self, path: str) -> str:
        """Save."""
        return path


def undone(**conditions):
    rule = Rule(id="r", decision="allow", transaction=True, writes=("out/**",), **conditions)
    return SafetyPolicy(name="p", rules=(rule,))


@pytest.mark.parametrize(
    ("conditions", "sandbox", "why"),
    [
        ({"commands": ("make **",)}, True, r"sh of shell-v0 is not @tool\(reversible=True\)"),
        ({"tools": ("s*",)}, True, "say of shell-v0 is not"),
        ({"tools": ("save",)}, False, "save of shell-v0 has no sandbox to restore"),
        ({"tools": ("save",)}, True, None),
        ({"effects": ("network",), "tools": ("save",)}, False, None),
    ],
)
def test_a_transaction_of_what_cannot_be_undone_is_refused(conditions, sandbox, why):
    if why is None:
        refuse_unfit(undone(**conditions), "shell-v0", Shell().tools, sandbox=sandbox)
        return
    with pytest.raises(ConfigError, match=f"rule 'r': transaction=true, and {why}"):
        refuse_unfit(undone(**conditions), "shell-v0", Shell().tools, sandbox=sandbox)


def test_it_is_refused_before_the_first_episode(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text(
        'name = "p"\n[[rules]]\nid = "build"\ndecision = "allow"\ntransaction = true\n'
        'tools = ["say"]\nwrites = ["out/**"]\n'
    )
    with pytest.raises(ConfigError, match="rule 'build': transaction=true, and say of echo-v0"):
        evaluate(EvalPlan(Echo, "noop", policy_file=str(file), out=tmp_path / "out"))
    assert not (tmp_path / "out" / "episodes.jsonl").exists()


def test_a_rule_for_a_tool_that_is_not_there_is_warned_of(tmp_path):
    file, notes = tmp_path / "p.toml", []
    deny = '[[rules]]\nid = "no"\ndecision = "deny"\ntools = ["sya"]\n'
    file.write_text(f'name = "p"\n{ALLOW}{deny}')
    plan = EvalPlan(Echo, "noop", policy_file=str(file), limit=1)
    evaluate(plan, EvalProgress(note=notes.append))
    told = "rule 'no': tools: no tool of echo-v0 is called 'sya'; it has say, submit"
    assert any(told in note for note in notes)
    fits = SafetyPolicy(name="q", rules=(Rule(id="a", decision="deny", tools=("s*",)),))
    assert list(idle_patterns(fits, "echo-v0", Echo().tools)) == []


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ({}, "rule 'b': taint: no tool of echo-v0 is called 'raed' or 'reda'; it has say, submit"),
        (
            {"taint": ("say",), "untrusted": ("yas",)},
            "untrusted: no tool of echo-v0 is called 'yas'",
        ),
        ({"taint": ("say",), "endorsing": ("s*",)}, "rule 'b': taint: 'say' is never a source"),
        ({"taint": ("say",), "untrusted": ("submit",)}, "rule 'b': taint: 'say' is never a source"),
        ({"taint": ("*",)}, ""),
    ],
)
def test_sources_that_are_never_heard_are_warned_of(sources, told):
    rule = Rule(id="b", decision="deny", taint=sources.pop("taint", ("raed", "say", "reda")))
    policy = SafetyPolicy(name="t", rules=(rule,), **sources)
    said = list(idle_patterns(policy, "echo-v0", Echo().tools))
    assert any(told in one for one in said) if told else said == []


def test_an_evaluation_does_not_go_on_with_or_without_a_policy(tmp_path):
    guarded = {"policy_file": "lockdown"}
    for first, second in (({}, guarded), (guarded, {})):
        out = tmp_path / ("guarded" if first else "plain")
        evaluate(EvalPlan(Echo, "noop", limit=2, out=out, **first))
        before = (out / "eval.json").read_bytes()
        with pytest.raises(ConfigError, match="holds an evaluation with another safety"):
            evaluate(EvalPlan(Echo, "noop", limit=2, out=out, **second))
        assert (out / "eval.json").read_bytes() == before
        evaluate(EvalPlan(Echo, "noop", limit=2, out=out, **first))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('canaries = ["/etc/../keys"]\n', "canaries"),
        ('[approval]\nkind = "scriptd"\n', "approval.kind='scriptd'"),
        ('[approval]\nkind = "scripted"\nanswers = { pay = "yes" }\n', "approval"),
    ],
)
def test_policy_test_reads_all_of_a_policy(tmp_path, row, why):
    file = tmp_path / "p.toml"
    top, rest = (row, "") if row.startswith("canaries") else ("", row)
    file.write_text(f'name = "p"\n{top}{ALLOW}{rest}')
    done = CliRunner().invoke(app, ["policy", "test", str(file)])
    assert isinstance(done.exception, ConfigError) and why in str(done.exception)


@pytest.mark.parametrize("path", ["./a.py", "out//a", "../a", "out/", "a/./b"])
def test_a_pattern_that_no_path_can_meet_is_refused(path):
    with pytest.raises(ValueError, match="matches no path: leave out"):
        Rule(id="r", decision="deny", paths=(path,))
    with pytest.raises(ValueError, match="matches no path"):
        Rule(id="r", decision="allow", writes=(path,))


@pytest.mark.parametrize(
    ("rule", "fix"),
    [
        (f'{ALLOW}paths = "src/**"\n', 'write paths = ["…"]'),
        (ALLOW.replace("[[rules]]", "[rules]"), "write [[rules]]"),
    ],
)
def test_a_list_is_asked_for_as_toml_writes_it(tmp_path, rule, fix):
    file = tmp_path / "p.toml"
    file.write_text(f'name = "p"\n{rule}')
    done = CliRunner().invoke(app, ["policy", "test", str(file)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith(f"is no list: {fix}")


def test_a_guard_as_recorded_passes_on_all_that_a_guard_is_asked():
    asked = {name for name in vars(Guard) if not name.startswith("_")}
    assert "removed" in asked and asked <= vars(_AsRecorded).keys()


def test_two_runs_under_two_policies_are_named(tmp_path):
    for name, more in (("plain", ()), ("guarded", ("--policy-file", "lockdown"))):
        words = ("eval", "calc-v0", "--policy", "oracle", "--limit", "3", *more)
        assert run_cli(*words, "--out", tmp_path / name).returncode == 0
    told = run_cli("compare", tmp_path / "plain", tmp_path / "guarded")
    assert "second oracle under the safety policy lockdown" in told.stdout
    found = last_json(run_cli("compare", tmp_path / "plain", tmp_path / "guarded", "--json").stdout)
    assert found["second"]["policy_file"] == "lockdown" and "policy_file" not in found["first"]
