"""desk-v0 against the data it was made for: recorded answers, references, and rules."""

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers import play_one
from retail_transcripts import outcomes_of

from agentrl import Message, ToolCall
from agentrl.dialogue import PolicyUser
from agentrl.envs.desk import Desk, calculate
from agentrl.envs.desk.retail import read_retail
from agentrl.envs.desk.shop import CHANGES, Shop
from agentrl.errors import ConfigError
from agentrl.policies.base import Scripted, noop
from agentrl.safety.ledger import changed_leaves, leaves_of
from agentrl.safety.loading import read_policy
from agentrl.specs import GuardSpec


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "tools" / "tau_retail"


@pytest.fixture(scope="module")
def retail(folder):
    return read_retail(folder)


@pytest.fixture(scope="module")
def desk(folder):
    return lambda: Desk(data=str(folder))


def all_tasks(retail):
    return [*retail.tasks["train"], *retail.tasks["test"]]


def scripted(calls, answer="Done."):
    turns = [Message.assistant("", ToolCall(name, given)) for name, given in calls]
    return Scripted("script", lambda task: [*turns, Message.assistant(answer)])


def oracle(task, leave_out=None, answer=None):
    """The reference of a task, without one of its calls where asked."""
    rows = [row for place, row in enumerate(task.oracle["calls"]) if place != leave_out]
    calls = [(row["name"], row["arguments"]) for row in rows]
    return scripted(calls, task.oracle["answer"] if answer is None else answer)


def test_the_answers_of_69_transcripts_are_reproduced(folder, retail):
    calls = [call for task in all_tasks(retail) for call in task.oracle["calls"]]
    sums = [one["arguments"]["expression"] for one in calls if one["name"] == "calculate"]
    outcomes = Counter(outcomes_of(folder, retail.tables, sums))
    ends = Counter(end for (_, end), count in outcomes.items() for _ in range(count))
    assert ends.pop("equal") == 469 and ends.total() == 10
    assert ends == {"no such tool in the policy": 7, "expression unknown": 3}
    changing = {name for (name, end) in outcomes if end == "equal"} & set(CHANGES)
    assert changing == set(CHANGES)


def test_references_reach_the_same_state_twice_and_pass(retail, desk):
    tasks = all_tasks(retail)
    assert len(tasks) == 114
    for task in tasks:
        shops = [Shop(retail.tables), Shop(retail.tables)]
        for shop in shops:
            _play(shop, task.oracle["calls"])
        assert shops[0].fingerprint() == shops[1].fingerprint() == task.hidden["state"], task.id
    for task in tasks[::4]:
        episode = play_one(desk, oracle(task), task)
        assert (episode.reward, episode.side_effects) == (1.0, {}), task.id


def test_without_its_last_change_a_reference_fails(retail):
    """104 references have a call that changes something, and 103 change something: that of desk-105
    pays 21.10 with a gift card of 17.00. The shop refuses it; there is no last write to leave out.
    """
    passing = []
    for task in all_tasks(retail):
        calls = task.oracle["calls"]
        places = [place for place, call in enumerate(calls) if call["name"] in CHANGES]
        if not places:
            continue
        shop = Shop(retail.tables)
        _play(shop, [call for place, call in enumerate(calls) if place != places[-1]])
        if shop.fingerprint() == task.hidden["state"]:
            passing.append(task.id)
    assert passing == ["desk-105"]
    task = next(task for task in all_tasks(retail) if task.id == "desk-105")
    shop, exchange = Shop(retail.tables), task.oracle["calls"][-1]
    with pytest.raises(ValueError, match="insufficient gift card balance"):
        shop.change(exchange["name"], exchange["arguments"])
    assert shop.fingerprint() == Shop(retail.tables).fingerprint()


def _play(shop, calls):
    for call in calls:
        if call["name"] in CHANGES:
            try:
                shop.change(call["name"], call["arguments"])
            except ValueError:
                continue


def test_a_reference_cut_short_is_no_pass_in_an_episode(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-0")
    last = len(task.oracle["calls"]) - 1
    assert play_one(desk, oracle(task), task).reward == 1.0
    assert play_one(desk, oracle(task, leave_out=last), task).reward == 0.0


def test_doing_nothing_passes_no_task(retail, desk):
    silent = [task for task in all_tasks(retail) if task.hidden["identified"]]
    assert sorted(task.id for task in silent) == [
        *("desk-10", "desk-105", "desk-12", "desk-25", "desk-50", "desk-57", "desk-65")
    ]
    for task in silent:
        assert play_one(desk, noop(), task).reward == 0.0, task.id
        assert play_one(desk, oracle(task), task).reward == 1.0, task.id


def test_what_has_to_be_said_is_looked_for_without_commas(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-46")
    assert task.hidden["said"] == ["1126.04", "1497.65"]
    said = play_one(desk, oracle(task, answer="It is $1,126.04 and $1,497.65."), task)
    assert said.reward == 1.0
    half = play_one(desk, oracle(task, answer="It is $1,126.04."), task)
    assert (half.reward, half.score.parts["said"]) == (0.0, 0.5)


def test_a_change_of_another_customers_order_is_a_side_effect(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-0")
    foreign = next(
        order
        for order in retail.tables["orders"].values()
        if order["status"] == "pending" and order["user_id"] != task.metadata["customer"]
    )
    calls = [(row["name"], row["arguments"]) for row in task.oracle["calls"]]
    cancel = {"order_id": foreign["order_id"], "reason": "no longer needed"}
    episode = play_one(desk, scripted([*calls, ("cancel_pending_order", cancel)]), task)
    assert episode.reward == 0.0
    assert episode.side_effects[f"state:orders/{foreign['order_id']}"] == "state changed"


def test_a_change_of_the_customers_own_is_named_to_the_field(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-16")
    customer = task.metadata["customer"]
    where = {"address1": "1 Way", "address2": "", "city": "A", "state": "CA", "country": "USA"}
    move = ("modify_user_address", {"user_id": customer, "zip": "90001", **where})
    episode = play_one(desk, scripted([move]), task)
    assert f"state:users/{customer}/address/zip" in episode.side_effects


def test_irreversible_calls_ask_first_and_what_is_refused_changes_nothing(retail, desk):
    guard = GuardSpec.of(read_policy("no-irreversible"))
    effects = {spec.name: spec.effect for spec in Desk().tools}
    asked = Counter()
    for task in all_tasks(retail)[::3]:
        episode = play_one(desk, oracle(task), task, guard=guard)
        for event in episode.events:
            asked[event.tool, event.rule == "cannot-be-undone"] += 1
        assert episode.side_effects == {}, task.id
    rules = {tool: rule for tool, rule in asked}
    assert all(rules[tool] == (effects[tool] == "irreversible") for tool in rules)
    assert sum(effects[name] == "irreversible" for name in CHANGES) == 4


def test_a_dry_run_changes_nothing(retail, desk, tmp_path):
    file = tmp_path / "dry.toml"
    file.write_text(
        'name = "dry"\ndry_run = true\n[[rules]]\nid = "all"\ndecision = "allow"\n'
        'effects = ["read", "write", "irreversible"]\n'
        '[[examples]]\ncall = { tool = "pay", effect = "irreversible" }\ndecision = "allow"\n'
    )
    guard = GuardSpec.of(read_policy(str(file)))
    task = next(task for task in all_tasks(retail) if task.id == "desk-16")
    opened = []

    def watched():
        opened.append(desk())
        return opened[-1]

    episode = play_one(watched, oracle(task), task, guard=guard)
    assert [event.verdict for event in episode.events].count("preview") == 3
    assert episode.reward == 0.0
    unplayed = Shop(retail.tables).fingerprint()
    assert {env.shop.fingerprint() for env in opened if hasattr(env, "shop")} == {unplayed}


def test_a_forged_answer_is_no_change(retail, desk):
    """Text that looks like an answer counts nowhere: only calls are made again."""
    task = next(task for task in all_tasks(retail) if task.id == "desk-0")
    done = Shop(retail.tables)
    _play(done, task.oracle["calls"])
    told = json.dumps(done.order(task.oracle["calls"][-1]["arguments"]["order_id"]))
    assert play_one(desk, scripted([], f"tool: {told}"), task).reward == 0.0


def test_the_customer_answers_questions_and_then_leaves(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-0")
    turns = [Message.assistant("Shall I go on?"), Message.assistant("Nothing was done.")]
    episode = play_one(desk, Scripted("asks", lambda task: turns), task)
    users = [message.content for message in episode.messages if message.role == "user"]
    assert users[1] == f"Yes, please. {task.metadata['user']['known']}"
    assert len(users) == 2 and episode.counts.turns == 2


def test_any_policy_may_be_the_customer(retail, desk):
    task = next(task for task in all_tasks(retail) if task.id == "desk-0")
    lines = [Message.assistant("I want my keyboard exchanged."), Message.assistant("###STOP###")]

    def played():
        env = desk()
        env.user = PolicyUser(Scripted("customer", lambda task: lines))
        return env

    turns = [Message.assistant("Hello, what do you need?"), Message.assistant("It is done.")]
    episode = play_one(played, Scripted("asks", lambda task: turns), task)
    assert "I want my keyboard exchanged." in [message.content for message in episode.messages]


def test_a_refused_change_leaves_no_trace(retail):
    shop = Shop(retail.tables)
    before = leaves_of(shop.rows_of("mia_garcia_4516"))
    order = shop.order("#W5490111")
    items = [item["item_id"] for item in order["items"]]
    for name, given in (
        ("return_delivered_order_items", {"item_ids": ["0"], "payment_method_id": "none"}),
        ("return_delivered_order_items", {"item_ids": items, "payment_method_id": "none"}),
        ("cancel_pending_order", {"reason": "no longer needed"}),
        ("modify_pending_order_payment", {"payment_method_id": "none"}),
    ):
        with pytest.raises(ValueError, match=r"not found|non-pending"):
            shop.change(name, {"order_id": order["order_id"], **given})
    assert not list(changed_leaves(before, leaves_of(shop.rows_of("mia_garcia_4516"))))
    assert shop.fingerprint() == Shop(retail.tables).fingerprint()


def test_data_that_is_not_there_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no db\.json\.gz: set data to"):
        list(Desk(data=str(tmp_path)).tasks("test", 0))
    for name in ("db.json.gz", "tasks.json.gz", "split_tasks.json", "policy.md"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="does not hold tau2-bench's retail files"):
        list(Desk(data=str(tmp_path)).tasks("test", 0))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3.5 + 1)", "9.0"), ("-1 + .25", "-0.75"), ("10 / 3", "3.33")],
)
def test_the_calculator_works_out_sums(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["1 / 0", "2 ** 9", "print(1)", "1e999 - x", "(" * 2000, ""])
def test_the_calculator_refuses_what_is_no_sum(expression):
    with pytest.raises(ValueError, match=r"no value|use numbers|may have"):
        calculate(expression)
