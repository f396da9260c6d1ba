"""Ways around a policy that were found once, each with the harmless command beside it."""

import pytest

from agentrl.safety.actions import actions_of
from agentrl.safety.loading import read_policy
from agentrl.safety.policy import Rule, SafetyPolicy
from agentrl.safety.shell import UNKNOWN, read_command
from agentrl.types import ToolCall, ToolSpec

RUN = ToolSpec("run", "", {}, "write", "command")


def decided(policy, command):
    policy = read_policy(policy) if isinstance(policy, str) else policy
    actions, _ = actions_of(ToolCall("run", {"command": command}), RUN, policy.paths)
    return policy.judge(actions)[0].decision


@pytest.mark.parametrize(
    "command",
    [
        "test -v 'x[$(touch y)]'",
        "test ! -v 'x[$(touch y)]'",
        "test -R 'x[$(touch y)]'",
        "test 'x[$(touch y)]' -eq 1",
        "test -t 'x[$(touch y)]'",
        "test -n a -a -v 'x[$(touch y)]'",
        "test -? x",
        "[ -v 'x[$(touch y)]' ]",
        "[[ -v 'x[$(touch y)]' ]]",
        "sed s,x*,y,p f",
        "sed -n s,x*,y,p f",
        "grep x* f",
        "printf x*",
        "date +*",
        "sort -k x* f",
        "strings @options",
        "echo x > -",
        "cat f | tee -",
        "mkdir -",
        "cat ./.?/.?/etc/passwd",
        "cat a/.[.]/b",
        "cat x*/.*/b",
    ],
)
def test_what_only_reads_allows_nothing_else(command):
    assert decided("read-only", command) == "deny"


@pytest.mark.parametrize(
    "command",
    [
        "test -f x && cat x",
        "test ! -d 'a b'",
        "test a = b",
        "test -n x",
        "test x -nt y",
        "cat .gitig* src/*.py",
        "sed 's,x*,y,p' f",
        "grep -rn main src --include=*.py",
        "cat f | sort - | head -3",
    ],
)
def test_what_only_reads_is_allowed(command):
    assert decided("read-only", command) == "allow"


def test_a_file_named_like_a_stream_is_a_path():
    def named(command):
        return [
            (one.path, one.writes) for step in read_command(command).steps for one in step.accesses
        ]

    assert named("echo x > -") == named("mkdir -") == named("tee -") == [("-", True)]
    assert named("cat -") == [] and named("cat < -") == [("-", False)]
    assert ("-", True) in named("cp a -")
    assert named("rm /dev/null") == [("/dev/null", True)] and named("cat /dev/null") == []


def test_a_part_that_may_climb_makes_the_path_unknown():
    for path in ("./.?/x", "a/.*", "[.]./x", ".?", "..*/x"):
        (step,) = read_command(f"cat {path}").steps
        assert [one.path for one in step.accesses] == [UNKNOWN], path


def closed(pattern, **rest):
    return SafetyPolicy(
        name="p",
        rules=(
            Rule(id="no", decision="deny", **{rest.get("kind", "writes"): (pattern,)}),
            Rule(id="ok", decision="allow"),
        ),
    )


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("rm -rf tests", "deny"),
        ("rm -r -- tests/", "deny"),
        ("mv tests old", "deny"),
        ("mv new tests", "deny"),
        ("rm -rf .", "deny"),
        ("rm -rf /sandbox", "deny"),
        ("rm -rf t*", "deny"),
        ("chmod -R 777 tests", "deny"),
        ("cp -r evil tests", "deny"),
        ("cp -r evil/tests .", "deny"),
        ("cp -r evil/tests/ .", "deny"),
        ("cp -r evil/. .", "deny"),
        ("cp a t*", "deny"),
        ("cp -r tests copy", "allow"),
        ("rm -rf out", "allow"),
        ("mv a b", "allow"),
        ("mkdir -p out/tests", "allow"),
        ("cp -r evil .", "allow"),
    ],
)
def test_a_prohibition_holds_for_the_folders_above(command, wanted):
    assert decided(closed("tests/**"), command) == wanted


def test_a_prohibition_holds_for_what_is_read_below():
    for command in ("grep -r x", "grep x ./*", "find .", "diff secret x", "cp -r . /tmp/x", "du"):
        assert decided(closed("secret/**", kind="paths"), command) == "deny", command
    assert decided(closed("secret/**", kind="paths"), "grep x src/a") == "allow"
    assert decided(closed("secret/**", kind="paths"), "grep -r x src") == "allow"


def test_hidden_files_are_kept_where_folders_are_moved_and_dot_is_no_hidden_file():
    assert decided("lockdown", "mv src old") == decided("lockdown", "rm -r src") == "deny"
    assert decided("lockdown", "cp given.txt .") == "allow"
    assert decided("lockdown", "cp a/.env .") == "deny"


def test_a_permission_of_a_folder_is_of_all_below():
    def may(command, *writes):
        return decided(
            SafetyPolicy(name="p", rules=(Rule(id="w", decision="allow", writes=writes),)), command
        )

    assert may("rm -r out/a", "out/*") == "deny" and may("rm out/a", "out/*") == "allow"
    assert may("rm -r out", "out", "out/**") == "allow"
