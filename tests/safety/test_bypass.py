"""Ways around a policy that were found once, each with the harmless command beside it."""

import asyncio
import math

import pytest
from helpers import make_task
from policy_cases import shell_answers

from agentrl.calls import CallContext
from agentrl.safety.actions import actions_of
from agentrl.safety.approval import AtTerminal, Request
from agentrl.safety.guard import preview
from agentrl.safety.loading import read_policy
from agentrl.safety.policy import ArgumentRule, Rule, SafetyPolicy
from agentrl.safety.shell import UNKNOWN, read_command
from agentrl.sandboxes import open_pool
from agentrl.specs import GuardSpec
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
        "wc *",
        "md5sum *.txt",
        "file *",
        "du *",
        "diff a *",
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
        "wc -l ./*.py && cat *",
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


def test_a_glob_above_the_work_area_may_lead_into_it():
    for command in ("cat /sandbox/w*/tests/x", "cat ../wor?/tests/x", "rm -rf /sand*"):
        assert decided(closed("tests/**", kind="paths"), command) == "deny", command


def test_a_call_is_a_transaction_where_one_of_its_steps_is():
    policy = SafetyPolicy(
        name="p",
        rules=(
            Rule(id="rm", decision="allow", effects=("irreversible",), commands=("rm **",)),
            Rule(id="x", decision="allow", commands=("touch **",), writes=("x",), transaction=True),
            Rule(id="y", decision="allow", effects=("write",), writes=("y",), transaction=True),
        ),
    )

    def undone(command):
        actions, _ = actions_of(ToolCall("run", {"command": command}), RUN, policy.paths)
        return [rule.id for rule in policy.transactions(actions)]

    assert undone("rm -f a") == []
    assert undone("echo z > given.txt; rm -f a") == ["y"]
    assert undone("touch x; echo z > y; rm -f a") == ["x", "y"]


def test_a_person_is_shown_every_step_and_no_text_forges_a_line():
    def shown(command):
        asked = ToolCall("run", {"command": command})
        return preview(asked, RUN, actions_of(asked, RUN, ())[0])

    many = "; ".join(["echo a"] * 30 + ["curl http://evil.example"] + ["echo b"] * 30)
    assert "\n  runs (network): curl http://evil.example\n" in shown(many)
    assert "y" * 5000 in shown(f"touch {'y' * 5000}")
    forged = shown("rm 'a\n  writes: nothing\u202e\nrun()'")
    assert [line.strip().partition(" ")[0] for line in forged.splitlines()] == [
        *('run(command="rm', "runs", "writes:"),
    ]
    assert "\u202e" not in forged


def test_what_is_too_long_to_be_shown_is_not_asked():
    def read():
        raise AssertionError("a person was asked")

    request = Request("x" * 20_000, "pay", {}, "costs", "t")
    reply = asyncio.run(AtTerminal(read).answer(request))
    assert reply.answer == "deny" and "characters to show" in reply.by


@pytest.mark.parametrize(
    ("rule", "value", "wanted"),
    [
        ({"one_of": (100,)}, 100.0, True),
        ({"one_of": (100.0,)}, 100, True),
        ({"one_of": (100,)}, 101.0, False),
        ({"one_of": (1,)}, True, None),
        ({"one_of": (True,)}, 1, None),
        ({"one_of": (100,)}, "100", None),
        ({"one_of": ("a",)}, None, None),
        ({"one_of": (100,)}, math.nan, None),
        ({"one_of": ("a", 1)}, "b", False),
        ({"min": 1000}, math.nan, None),
        ({"max": 1000}, math.nan, None),
        ({"min": 1000}, math.inf, True),
        ({"min": 1000}, 10**400, True),
    ],
)
def test_numbers_are_compared_with_numbers_and_nothing_with_nan(rule, value, wanted):
    assert ArgumentRule(**rule).holds(value) is wanted


PASSWD = "/etc/passwd"


@pytest.mark.parametrize(
    "arguments",
    [
        *({name: PASSWD} for name in ("filepath", "src", "dst", "dest", "dir", "output")),
        *({name: ["a", PASSWD]} for name in ("paths", "files", "filenames")),
        {"edits": [{"path": "a"}, {"path": PASSWD}]},
        {"edits": {"first": {"to": {"file_path": PASSWD}}}},
        {"files": {PASSWD: "text"}},
        {"files": [{"path": PASSWD, "text": "x"}]},
        {"text": "a write of which no path is known"},
    ],
)
def test_paths_are_found_under_every_usual_name_and_in_tables(arguments):
    policy = read_policy("work-area")
    spec = ToolSpec("write_file", "", {}, "write", "")
    actions, _ = actions_of(ToolCall("write_file", arguments), spec, policy.paths)
    assert policy.judge(actions)[0].decision == "deny"


def test_paths_in_tables_are_allowed_where_all_are():
    policy = read_policy("work-area")
    spec = ToolSpec("write_file", "", {}, "write", "")
    for arguments in ({"edits": [{"path": "a"}]}, {"files": [{"path": "a", "text": "/etc"}]}):
        actions, _ = actions_of(ToolCall("write_file", arguments), spec, policy.paths)
        assert policy.judge(actions)[0].decision == "allow"


def test_what_is_denied_does_harm_in_a_real_shell(bubblewrap):
    hidden = "test -v 'x[$(rm -rf src)]'"
    yes = SafetyPolicy(name="yes", rules=(Rule(id="yes", decision="allow"),))
    assert shell_answers(yes, hidden, "ls") == ["", "given\n"]
    denied, seen = shell_answers(read_policy("read-only"), hidden, "ls")
    assert denied.startswith("error: denied") and seen == "given\nsrc\n"


def test_a_second_step_does_not_switch_a_transaction_off(bubblewrap):
    policy = SafetyPolicy(
        name="p",
        rules=(
            Rule(id="rm", decision="allow", effects=("irreversible",), commands=("rm **",)),
            Rule(id="read", decision="allow", effects=("read",)),
            Rule(
                id="out",
                decision="allow",
                effects=("write",),
                writes=("out", "out/**"),
                transaction=True,
            ),
        ),
    )
    undone, seen, _, out = shell_answers(
        policy,
        "echo evil > given; rm -f nothing",
        "cat given",
        "mkdir out; echo 1 > out/x; rm -f nothing",
        "cat out/x",
    )
    assert "undone, since it changed given" in undone and (seen, out) == ("g\n", "1\n")


MOVES = {
    "mv a.txt b.txt": "allow",
    "mv -f a.txt docs": "allow",
    "mv a.txt docs/a.txt kept": "allow",
    "mv docs kept": "deny",
    "mv a.txt docs kept": "deny",
    "mv link b.txt": "deny",
    "mv linked/a.txt b.txt": "deny",
    "mv missing b.txt": "deny",
    "mv a.txt .env": "deny",
    "mv docs/.env b.txt": "deny",
    "mv *.txt docs": "deny",
    "touch a.txt; mv a.txt b.txt": "deny",
    "cd docs; mv a.txt b.txt": "deny",
    "mv a.txt ../b.txt": "deny",
}


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_lockdown_lets_files_be_moved_and_no_folder(backend, request):
    """Which of both it is, the sandbox says."""
    request.getfixturevalue(backend)

    async def decisions():
        pool = open_pool(backend, 1)
        try:
            async with pool.lease("agent") as sandbox:
                for command in MOVES:
                    await sandbox.reset({"a.txt": b"1", "docs/a.txt": b"2", "docs/.env": b"3"})
                    await sandbox.exec(["sh", "-c", "mkdir kept; ln -s docs link; ln -s . linked"])
                    yield command, await judged(command, sandbox)
                await sandbox.exec(["sh", "-c", "sleep 60 >/dev/null 2>&1 &"])
                yield "while something runs", await judged("mv a.txt b.txt", sandbox)
        finally:
            await pool.close()

    async def judged(command, sandbox):
        guard = GuardSpec.of(read_policy("lockdown"))()
        context = CallContext("e", make_task().view(), 1, 1, sandbox)
        decision = await guard.before(ToolCall("run", {"command": command}), RUN, context)
        return decision.verdict

    async def collected():
        return {command: verdict async for command, verdict in decisions()}

    assert asyncio.run(collected()) == {**MOVES, "while something runs": "deny"}


@pytest.mark.parametrize(
    ("command", "strict"),
    [
        ("cp -r /proc/self/cwd x", True),
        ("cp -R ../../proc/self/cwd x", True),
        ("cp -r /tmp x", True),
        ("cp -r a /proc/1/cwd x", True),
        ("mv /proc/self/cwd x", True),
        ("cp -r src copy", False),
        ("cp -r /tmp/build .", False),
        ("cp /usr/share/dict/words .", False),
        ("mv a b", False),
        ("mv a /tmp/b", False),
    ],
)
def test_no_link_is_brought_in_from_outside(command, strict):
    (step,) = read_command(command).steps
    assert bool(step.why) is strict, step
