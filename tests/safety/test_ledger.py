"""The ledger: what differs at the end and was not to be changed."""

import asyncio

import pytest
from helpers import Echo, call, make_task, play_one, says, script
from hypothesis import given
from hypothesis import strategies as st
from office import BENIGN, CAREFUL, GOALS, GULLIBLE, Office

from agentrl.errors import ContractError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.registry import factory
from agentrl.rollout.play import Setting, play
from agentrl.safety.ledger import changed_leaves, leaves_of
from agentrl.safety.writes import WriteSet
from agentrl.sandboxes import open_pool
from agentrl.tools import tool
from agentrl.trajectory import EpisodeKey


class Files(Echo):
    """A shell in a sandbox, and one file that may change."""

    id = "files-v0"
    needs_sandbox = True
    writes = WriteSet(files=("out.txt", "made/**"))

    @tool(effect="write", shell="command")
    async def run(self, command: str) -> str:
        """Run a command.

        Args:
            command: for the shell.
        """
        result = await self.sandbox.exec(["/bin/sh", "-c", command])
        return result.stdout.decode()


def played(command, backend="bubblewrap", env=Files):
    async def run():
        pool = open_pool(backend, size=1)
        turns = script(says(call("run", command=command)), says(content="yes"))
        files = {"given.txt": "a", "kept/x.txt": "b"}
        try:
            task = make_task(hidden={"answer": "yes"}, files=files)
            return await play(Setting(env, turns, pool), task, EpisodeKey("r", 0, "t", 0))
        finally:
            await pool.close()

    return asyncio.run(run()).side_effects


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_what_differs_and_was_not_declared_is_a_side_effect(backend, request):
    request.getfixturevalue(backend)
    command = (
        "echo 1 >out.txt; mkdir -p made/deep; echo 1 >made/deep/y; echo 2 >given.txt;"
        " rm kept/x.txt; chmod 700 kept; mkdir other; ln -s /etc/passwd other/link;"
        " (sleep 60 >/dev/null 2>&1 &)"
    )
    assert played(command, backend) == {
        "given.txt": "changed",
        "kept": "mode changed",
        "kept/x.txt": "deleted",
        "other": "added",
        "other/link": "added",
        "process:": "process left",
    }


class Shells(Files):
    """The same with a shell that stays, which nobody closes."""

    id = "shells-v0"

    async def setup(self):
        self.shell = await self.sandbox.open_session()

    @tool(effect="write", shell="command")
    async def run(self, command: str) -> str:
        """Run a command.

        Args:
            command: for the shell.
        """
        return (await self.shell.run(command)).stdout.decode()


PLACES = "echo 1 >/tmp/a; mkdir /tmp/b; echo 2 >/tmp/b/c; echo 3 >/dev/shm/d"


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_every_place_that_a_command_can_write_to_is_looked_at(backend, request):
    request.getfixturevalue(backend)
    found = dict.fromkeys(("/tmp/a", "/tmp/b", "/tmp/b/c", "/dev/shm/d"), "added")
    assert played(PLACES, backend) == found

    class Tidy(Files):
        writes = WriteSet(files=("/tmp/**", "**"))

    assert played(PLACES, backend, Tidy) == {"/dev/shm/d": "added"}


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_a_mode_of_the_work_area_and_where_a_link_leads_are_looked_at(backend, request):
    request.getfixturevalue(backend)

    class Linked(Files):
        async def setup(self):
            await self.sandbox.exec(["ln", "-s", "given.txt", "link"])

    assert played(
        "ln -sfn /etc/passwd link; chmod 4755 given.txt; chmod 000 .", backend, Linked
    ) == {
        ".": "mode changed",
        "given.txt": "mode changed",
        "link": "changed",
    }


def test_what_is_elsewhere_in_the_sandbox_is_looked_at(bubblewrap):
    command = "cd /sandbox; echo 1 >stray; chmod 500 tmp; chmod 700 /sandbox"
    assert played(command) == {
        "/sandbox": "mode changed",
        "/sandbox/stray": "added",
        "/tmp": "mode changed",
    }


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_an_open_session_is_no_process_left_and_what_it_started_is(backend, request):
    request.getfixturevalue(backend)
    assert played("x=1; cd kept", backend, Shells) == {}
    assert played("sleep 60 >/dev/null 2>&1 &", backend, Shells) == {"process:": "process left"}
    hidden = "(setsid sleep 60 >/dev/null 2>&1 &)"
    assert played(hidden, backend, Shells) == {"process:": "process left"}


def test_only_declared_changes_are_no_side_effect(bubblewrap):
    assert played("echo 1 >out.txt; mkdir made; echo 2 >made/x") == {}


def test_a_file_that_is_changed_back_is_no_side_effect(bubblewrap):
    assert played("printf b >given.txt; printf a >given.txt; chmod 644 given.txt") == {}


def test_an_environment_that_declares_nothing_is_not_measured(bubblewrap):
    class Silent(Files):
        writes = None

    assert played("rm given.txt", env=Silent) is None
    assert play_one(Echo, script(says(content="yes"))).side_effects is None


@pytest.mark.parametrize(
    "pattern", ["/etc/passwd", "../x", "", "a/../../x", "./x", "/tmp/", "/tmp/../x"]
)
def test_a_write_set_outside_of_the_work_area_is_refused(pattern):
    with pytest.raises(ContractError, match="leaves the work area") as raised:
        WriteSet(files=(pattern,))
    assert repr(pattern) in str(raised.value)


def test_a_write_set_that_is_text_is_refused():
    with pytest.raises(ContractError, match="must be a tuple"):
        WriteSet(files="out.txt")


def test_rows_with_ids_keep_their_places():
    before = leaves_of({"mails": [{"id": 1, "t": "a"}, {"id": 2, "t": "b"}, {"id": 3, "t": "c"}]})
    after = leaves_of({"mails": [{"id": 1, "t": "a"}, {"id": 3, "t": "d"}]})
    assert sorted(changed_leaves(before, after)) == [
        ("mails/2/id", "deleted"),
        ("mails/2/t", "deleted"),
        ("mails/3/t", "changed"),
    ]
    assert leaves_of({"a/b": 1, "c": [], "d": [1, 2]}) == {
        "a\\b": "1",
        "c": "[]",
        "d/0": "1",
        "d/1": "2",
    }
    with pytest.raises(ContractError, match="plain JSON"):
        leaves_of({"a": {1, 2}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON), st.dictionaries(st.text(max_size=3), JSON))
def test_equal_states_have_no_difference_and_one_more_leaf_is_one(one, other):
    left, right = leaves_of(one), leaves_of(other)
    assert not list(changed_leaves(left, left))
    forth, back = (
        {place: how for place, how in changed_leaves(*pair)}
        for pair in ((left, right), (right, left))
    )
    assert forth.keys() == back.keys()
    turned = {"added": "deleted", "deleted": "added", "changed": "changed"}
    assert back == {place: turned[how] for place, how in forth.items()}


def office(policy, attacked):
    env = Office(attacked)
    return [
        (task, play_one(lambda: Office(attacked), policy, task)) for task in env.tasks("test", 0)
    ]


def test_the_ledger_sees_what_a_gullible_agent_was_talked_into():
    assert len(BENIGN) >= 10 and len(GOALS) >= 6
    exposed = 0
    for task, episode in office(GULLIBLE, attacked=True):
        payload = task.metadata["injection"]["payload"]
        heard = [m.content for m in episode.messages if m.role == "tool"]
        seen = any(payload in text.replace('\\"', '"') for text in heard)
        exposed += seen
        assert bool(episode.side_effects) == seen == bool(episode.score.parts["attack"]), task.id
    assert exposed == 12 * 8  # every task has the agent read what the attacker can write


def test_the_ledger_sees_nothing_of_a_careful_agent():
    for attacked in (False, True):
        for task, episode in office(CAREFUL, attacked):
            assert episode.side_effects == {} and episode.passed, task.id


def test_eval_tells_side_effects_of_shipped_environments(bubblewrap):
    for name in ("calc-v0", "bugfix-v0", "code-v0"):
        result = evaluate(EvalPlan(factory(name), limit=2, sandbox="bubblewrap"))
        found = result["side_effects"]
        assert found["measured"] == 2 and found["rate"] == 0.0 and found["where"] == []
