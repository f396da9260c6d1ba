"""Shell commands: tricks, a slow reference, and what bash itself does."""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shell_tricks import HARMLESS, KNOWN, OWN

from agentrl.safety.actions import actions_of
from agentrl.safety.loading import read_policy
from agentrl.safety.programs import PROGRAMS
from agentrl.safety.shell import UNKNOWN, read_command, resolve
from agentrl.types import ToolCall, ToolSpec

RUN = ToolSpec("run", "", {}, "write", "command")


def ruling(command, policy="work-area"):
    policy = read_policy(policy)
    actions, _ = actions_of(ToolCall("run", {"command": command}), RUN, policy.paths)
    return policy.judge(actions)[0]


def test_there_are_forty_tricks_of_the_field_and_twenty_more():
    assert (len(set(KNOWN)), len(set(OWN))) == (40, 20)


@pytest.mark.parametrize("policy", ["read-only", "work-area"])
@pytest.mark.parametrize("command", KNOWN + OWN)
def test_no_trick_slips_through(command, policy):
    assert ruling(command, policy).decision == "deny"


@pytest.mark.parametrize("command", HARMLESS)
def test_what_people_write_is_allowed(command):
    assert ruling(command).decision == "allow"


def test_a_directory_that_was_changed_is_kept_for_later_commands():
    policy = read_policy("work-area")
    places = frozenset({"."})
    for command, wanted in (("cd src", "allow"), ("cat x", "allow"), ("cat ../x", "deny")):
        call = ToolCall("run", {"command": command})
        actions, places = actions_of(call, RUN, policy.paths, (), places)
        assert policy.judge(actions)[0].decision == wanted, command
    assert places == {".", "src"}


def test_a_path_is_resolved_before_it_is_judged():
    assert list(resolve("a/./b/../c")) == ["a/c"] and list(resolve("/sandbox/work/x")) == ["x"]
    assert list(resolve("../work/x")) == ["x"] and list(resolve("../../etc")) == ["/etc"]
    assert list(resolve("~/x")) == [UNKNOWN] == list(resolve("x", frozenset({UNKNOWN})))


def test_a_prohibition_sees_what_the_shell_may_expand():
    def decided(command):
        actions, _ = actions_of(ToolCall("run", {"command": command}), RUN, ())
        from agentrl.safety.policy import Rule, SafetyPolicy

        policy = SafetyPolicy(
            name="p",
            rules=(
                Rule(id="secret", decision="deny", paths=("secret/**",)),
                Rule(id="open", decision="allow", effects=("read",), paths=("**",)),
            ),
        )
        return policy.judge(actions)[0].rule

    assert decided("cat open/*.txt") == "open"
    for command in (
        "cat secre?/x",
        "cat */x",
        "cat s*/x",
        "cat [s]ecret/x",
        "cat open/../secret/x",
    ):
        assert decided(command) == "secret", command


TOKENS = (
    "ls cat rm echo cd find sed sort a ../x /etc -r -la -exec > >> < | || && ; & ( ) { } $x $( ) `"
    " ' \" \\ # ! * ? [a] ~ <( >( <<E E == = X=1 $'a' 2>&1 &> {a,b} if then fi for do done \n \t"
    " \0 é \u00a0 \r -- - . .. .* time coproc [[ ]] (( )) function esac ;; ${x} $((1)) <<<"
)
WORDS = st.sampled_from(TOKENS.split(" "))
LINES = st.lists(WORDS, max_size=9).flatmap(
    lambda words: st.sampled_from([" ".join(words), "".join(words)])
) | st.text(max_size=40)
READERS = {"cd", "find"} | {name for name, one in PROGRAMS.items() if one.effect == "read"}
_SAFE = re.compile(r"[A-Za-z0-9_./ \n-]*")


def reference(command):
    """A slow evaluator of "only these readers, only paths inside": it reads letters, not syntax.

    It knows only commands without any character that means something to a shell.
    """
    if not _SAFE.fullmatch(command):
        return None
    for line in command.split("\n"):
        words = line.split(" ")
        words = [word for word in words if word]
        if not words:
            continue
        if words[0] not in READERS:
            return "deny"
        if words[0] != "echo" and any(
            word.startswith("/") or ".." in word.split("/") for word in words[1:]
        ):
            return "deny"
        if any(word in ("-exec", "-delete") for word in words) and words[0] == "find":
            return "deny"
    return "any"


def check(command):
    line = read_command(command)
    decided = ruling(command, "read-only").decision
    if reference(command) == "deny":
        assert decided == "deny", command
    if decided == "allow" and any(mark in command for mark in ("$", "`", "<(", ">(")):
        # Only as text between single quotes, after a backslash, or in a comment.
        assert any(mark in command for mark in ("'", "#")), command
    assert all(step.effect and (step.argv or step.why or step.accesses) for step in line.steps)


@given(LINES)
@settings(max_examples=300, deadline=None)
def test_nothing_crashes_and_nothing_is_allowed_that_the_reference_denies(command):
    check(command)


@pytest.mark.long
@given(LINES)
@settings(max_examples=7000, deadline=None)
def test_the_same_seven_thousand_times(command):
    check(command)


QUOTED = st.sampled_from(["a", "b c", "*", "x;y", "$x", "`", "#", "\\", "-n", "é", "it", "(", ">"])
PIECES = st.one_of(
    st.sampled_from(["a", "b", "x.txt", "-n", "d/e", "1"]),
    QUOTED.map(lambda text: "'" + text + "'"),
    QUOTED.map(lambda text: '"' + text.replace("\\", "\\\\") + '"'),
)
ARGV = st.lists(st.lists(PIECES, min_size=1, max_size=2).map("".join), max_size=3)
COMMANDS = st.lists(ARGV.map(lambda words: " ".join(["cat", *words])), min_size=1, max_size=4)
JOINTS = st.sampled_from([" && ", "; ", " | ", "\n", " || "])


def understood(commands, joint):
    line = joint.join(commands)
    steps = read_command(line).steps
    return line, [step.argv for step in steps] if all(not s.why for s in steps) else None


async def bash(sandbox, lines):
    """The words that real bash gives to `cat`, line by line."""
    # One write for each call, as the parts of a pipe run at the same time.
    script = (
        'exec 3>&1\ncat() { local s; printf -v s "%s\\037" cat "$@"; printf "%s\\036" "$s" >&3; }\n'
    )
    found = []
    for line in lines:
        result = await sandbox.exec(["/bin/bash", "-c", script + line])
        rows = result.stdout.decode().split("\036")[:-1]
        found.append([tuple(row.split("\037")[:-1]) for row in rows])
    return found


@pytest.mark.parametrize(
    "count", [40, pytest.param(1500, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_the_words_are_those_that_bash_makes_of_them(count, bubblewrap):
    cases = []

    @given(COMMANDS, JOINTS)
    @settings(max_examples=count, deadline=None, database=None)
    def gather(commands, joint):
        cases.append(understood(commands, joint))

    gather()
    known = [(line, steps) for line, steps in cases if steps is not None]
    assert len(known) > count / 4

    async def run():
        from agentrl.sandboxes import open_pool

        pool = open_pool("bubblewrap", 1)
        try:
            async with pool.lease("agent") as sandbox:
                return await bash(sandbox, [line for line, _ in known])
        finally:
            await pool.close()

    for (line, steps), got in zip(known, asyncio.run(run()), strict=True):
        if " | " in line:
            assert sorted(got) == sorted(steps), line
        elif " || " in line:  # only the first runs
            assert got == steps[:1], line
        else:
            assert got == steps, line
