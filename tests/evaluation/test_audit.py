"""`agentrl audit`: green for what ships, red on exactly the row that an environment breaks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from broken_envs import BROKEN, JUDGE, Sound
from helpers import Echo, last_json, loop_threads, make_task, run_cli, wait_for

from agentrl.errors import ConfigError, SandboxLost
from agentrl.evaluation.audit import PROMISES, AuditPlan, audit
from agentrl.evaluation.audit.probes import Probe, probes
from agentrl.evaluation.audit.scores import SLOW_S
from agentrl.evaluation.audit.stage import AuditStage
from agentrl.evaluation.audit.variants import with_canary
from agentrl.registry import factory
from agentrl.sandboxes import open_pool
from agentrl.types import Message, Score, ToolCall
from agentrl.verifiers.code.hidden_tests import PYTHON
from agentrl.verifiers.process import turns_of
from agentrl.verifiers.shaping import Term, shaped
from agentrl.verifiers.state.stores import json_state


def verdicts(result) -> dict[str, str]:
    return {row["promise"]: row["verdict"] for row in result["rows"]}


@pytest.mark.parametrize("env_id", ["bugfix-v0", "calc-v0", "code-v0"])
def test_what_ships_can_be_trusted(env_id, bubblewrap):
    result = audit(AuditPlan(factory(env_id), tasks=3, attacks=probes))
    assert result["ok"], [row for row in result["rows"] if row["verdict"] == "broken"]
    json.dumps(result, allow_nan=False)
    wait_for(lambda: not loop_threads())


def test_a_sound_environment_keeps_every_promise(bubblewrap):
    result = audit(AuditPlan(Sound, attacks=probes))
    assert set(verdicts(result).values()) == {"holds", "not applicable"}, result["rows"]
    assert [name for name, verdict in verdicts(result).items() if verdict == "not applicable"] == [
        "learnability"
    ]


@pytest.mark.parametrize("name", BROKEN)
def test_the_broken_promise_and_no_other_is_red(name, bubblewrap):
    result = audit(AuditPlan(BROKEN[name], attacks=probes))
    red = {row["promise"]: row for row in result["rows"] if row["verdict"] == "broken"}
    assert set(red) == {name}, red
    assert (
        red[name]["task"].startswith(("train/", "test/")) and red[name]["why"] and red[name]["hint"]
    )
    assert not result["ok"]


def test_every_promise_has_an_environment_that_breaks_it():
    assert {promise.name for promise in PROMISES} == {*BROKEN, "learnability"}


def test_the_first_wrong_task_is_named(bubblewrap):
    row = audit(AuditPlan(BROKEN["oracle"], attacks=probes))["rows"][0]
    assert row["promise"] == "oracle" and row["task"] == "test/says how"
    assert row["evidence"] == {"episodes": 6, "passed": 3}


@pytest.mark.long
@pytest.mark.parametrize("sandbox", ["bubblewrap", "docker"])
@pytest.mark.parametrize("env_id", ["bugfix-v0", "calc-v0", "code-v0"])
def test_what_ships_can_be_trusted_under_every_attack(env_id, sandbox, request):
    request.getfixturevalue(sandbox)
    result = audit(AuditPlan(factory(env_id), tasks=3, sandbox=sandbox))
    assert result["ok"], [row for row in result["rows"] if row["verdict"] == "broken"]


def test_an_attack_that_hangs_is_tried_once_and_a_script_runs_where_the_agent_does(
    bubblewrap, monkeypatch
):
    timed = AuditStage.timed_score

    async def on_an_idle_machine(
        self, submission
    ):  # where what does not hang takes no time to speak of
        score, seconds = await timed(self, submission)
        hangs = b"sleep" in submission.artifacts["solution.py"]
        return score, seconds if hangs else min(seconds, SLOW_S)

    monkeypatch.setattr(AuditStage, "timed_score", on_an_idle_machine)

    def attacks(task):
        yield Probe("hang", {"solution.py": f"import time\ntime.sleep({SLOW_S + 1})\n".encode()})
        text = task.oracle["files"]["solution.py"]
        yield Probe("write", {"solution.py": b""}, f"open('solution.py', 'w').write({text!r})")

    row = next(
        row
        for row in audit(AuditPlan(Sound, attacks=attacks))["rows"]
        if row["promise"] == "attacks"
    )
    assert row["verdict"] == "broken" and "'write' gets score 1" in row["why"]
    assert row["evidence"] == {
        "attacks": 2,
        "tries": 3,
        "accepted": {"write": 2},
        "slow_tried_once": ["hang"],
    }


def test_a_sandbox_that_is_not_as_at_its_start_is_a_broken_reset(bubblewrap, monkeypatch):
    async def verify(self):
        return ["processes"]

    monkeypatch.setattr("agentrl.sandboxes.lease.Lease.verify", verify)
    row = next(
        row
        for row in audit(AuditPlan(Sound, tasks=1, attacks=probes))["rows"]
        if row["promise"] == "reset"
    )
    assert row["verdict"] == "broken" and "differs in processes" in row["why"]


def test_the_command_says_what_holds_and_how_to_mend_what_does_not(tmp_path):
    good = run_cli("audit", "calc-v0", "--limit", "2", "--json", "--out", tmp_path)
    assert good.returncode == 0 and last_json(good.stdout)["ok"], good.stderr
    assert json.loads((tmp_path / "audit.json").read_text()) == last_json(good.stdout)
    file = tmp_path / "lax.py"
    file.write_text(
        "from agentrl import Score, Task, ToolEnv\n\nasync def always(submission):\n    return"
        " Score(1.0)\n\nclass Lax(ToolEnv):\n    '''Always content.'''\n    id = 'lax-v0'\n   "
        " verifier = always\n    def tasks(self, split, seed):\n        yield Task(id=split,"
        " instruction=split, hidden={'answer': 'a'})\n"
    )
    bad = run_cli("audit", f"{file}:Lax", "--fix-hints", COLUMNS="200")
    assert (
        bad.returncode == 1
        and "BROKEN" in bad.stdout
        and "fix: let the hidden part assert" in bad.stdout
    )
    for words, why in (
        (["no-such-env"], "unknown"),
        (["calc-v0", "--limit", "0"], "--limit"),
        (["calc-v0", "--split", "dev"], "split='dev'"),
        (["calc-v0", "--policy", "gpt"], "gpt"),
        (["calc-v0", "--sandbox", "moon"], "moon"),
    ):
        done = run_cli("audit", *words)
        assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_an_environment_that_raises_is_red_and_a_lost_sandbox_is_not_its_fault(monkeypatch):
    class Raises(Echo):
        def oracle_actions(self, task):
            raise KeyError("oracle")

    rows = {
        row["promise"]: row for row in audit(AuditPlan(Raises, tasks=2, sandbox="process"))["rows"]
    }
    assert rows["oracle"]["verdict"] == "broken" and "KeyError" in rows["oracle"]["why"]
    assert rows["noop"]["verdict"] == "holds"

    class Needs(Echo):
        needs_sandbox = True

    async def lost(self, role, limits):
        raise SandboxLost("no more room")

    monkeypatch.setattr("agentrl.sandboxes.process.ProcessBackend.open", lost)
    with pytest.raises(SandboxLost, match="no more room"):
        audit(AuditPlan(Needs, tasks=1, sandbox="process"))
    with pytest.raises(ConfigError, match="at least 1"):
        AuditPlan(Echo, tasks=0)


class Slow(Echo):
    """Its verifier takes longer than it may, and its opening holds an example of a turn."""

    verifier_s = 0.05

    @staticmethod
    async def verifier(submission):
        await asyncio.sleep(60)

    def prompt(self):
        return [*super().prompt(), Message.assistant("yes"), Message.user("And now?")]


def test_work_is_handed_in_and_graded_as_a_rollout_does_it():
    async def run():
        task = make_task(hidden={"answer": "yes"})
        stage = AuditStage(Slow, open_pool("process"), {"test": [task]}, [task], lambda task: ())
        submission = await stage.hand_in(task, Probe("says", answer="no"))
        return submission, await stage.score(submission)

    submission, score = asyncio.run(run())
    assert [turn.said.content for turn in turns_of(submission)] == ["no"]
    assert score.value is None and "within 0.05 s" in score.why


class Generated(Sound):
    """Its cases are drawn anew for each grading."""

    def tasks(self, split, seed):
        text = "def generate(rng):\n    return (rng.randrange(-1000, 1000),)\n"
        for task in super().tasks(split, seed):
            yield task.model_copy(update={"hidden": {"entry_point": "f", "generate": text}})


class States(Sound):
    """A file with a table is judged."""

    verifier = staticmethod(json_state())

    def tasks(self, split, seed):
        for n, task in enumerate(super().tasks(split, seed)):
            hidden = {
                "state": "s.json",
                "tables": {"t": [{"a": {"py": repr(task.id)}, "n": n}]},
                "may_write": ["log"],
            }
            files = {"solution.py": json.dumps({"t": [{"a": task.id, "n": n}]})}
            yield task.model_copy(
                update={"hidden": hidden, "artifacts": ("s.json",), "oracle": {"files": files}}
            )

    def oracle_actions(self, task):
        yield Message.assistant(
            "",
            ToolCall("write_file", {"path": "s.json", "text": task.oracle["files"]["solution.py"]}),
        )
        yield Message.assistant("", ToolCall("submit", {}))


class Tested(Sound):
    """Test files import the solution."""

    def tasks(self, split, seed):
        for task in super().tasks(split, seed):
            calls = [f"f({case['args'][0]}) == {case['expected']}" for case in task.hidden["cases"]]
            tests = "".join(
                f"\n\ndef test_{n}():\n    assert {call}\n" for n, call in enumerate(calls)
            )
            yield task.model_copy(
                update={"hidden": {"tests": {"test_f.py": f"from solution import f\n{tests}"}}}
            )


async def _quotes(submission) -> Score:
    score = await JUDGE(submission)
    tests = {name: text.encode() for name, text in submission.task.hidden["tests"].items()}
    async with submission.pool.lease("grader") as sandbox:
        await sandbox.put({**submission.artifacts, **tests})
        result = await sandbox.exec([PYTHON, "-B", "-c", "import test_f\ntest_f.test_0()"])
    return replace(score, why=result.stderr.decode(errors="replace")[-200:] or score.why)


class QuotesTests(Tested):
    """Its verdict is right, and quotes what a test said."""

    verifier = _quotes


@pytest.mark.parametrize(("env", "red"), [(Tested, []), (QuotesTests, ["hidden_untold"])])
def test_a_verdict_that_quotes_a_test_and_no_other_tells_what_is_hidden(env, red, bubblewrap):
    result = audit(AuditPlan(env, tasks=1, attacks=probes))
    assert [row["promise"] for row in result["rows"] if row["verdict"] == "broken"] == red, result[
        "rows"
    ]
    assert verdicts(result)["hidden_untold"] == ("broken" if red else "holds")


def test_the_reference_passes_tests_with_a_canary(bubblewrap):
    """Else their control would refuse the task, and no verdict of a sound verifier would have been
    looked at.
    """

    async def run():
        pool = open_pool("bubblewrap")
        try:
            task, *_ = Tested().tasks("test", 0)
            planted, _ = with_canary(task, "canary-1")
            assert planted.hidden["tests"]["test_f.py"].count("canary-1") == 5
            stage = AuditStage(Tested, pool, {"test": [planted]}, [planted], probes)
            return await stage.oracle()
        finally:
            await pool.close()

    assert all(episode.passed for episode in asyncio.run(run()))


@pytest.mark.parametrize("env", [Generated, States])
def test_other_hidden_parts_can_be_sound_too(env, bubblewrap):
    result = audit(AuditPlan(env, attacks=probes))
    assert result["ok"], [row for row in result["rows"] if row["verdict"] == "broken"]


async def _believes(submission) -> Score:
    return Score(float(b"_exit" in submission.artifacts.get("solution.py", b"")), {}, "as it says")


class PenalisedHole(Sound):
    """An attack passes, and shaping takes its reward below the threshold."""

    verifier = staticmethod(shaped(_believes, Term("long", 0.5, lambda submission: -0.1)))


def test_shaping_hides_no_attack_that_passes(bubblewrap):
    rows = verdicts(audit(AuditPlan(PenalisedHole, attacks=probes)))
    assert rows["attacks"] == "broken"


def test_an_audit_says_what_it_is_at_before_each_row():
    told, begun = [], []

    class Counted(Echo):
        count = 1

        def __init__(self):
            begun.append(len(told))

    audit(AuditPlan(Counted, tasks=1, attacks=probes), told.append)
    assert told == [promise.name for promise in PROMISES]
    assert len(set(begun)) > 2, "rows were told all at once"
