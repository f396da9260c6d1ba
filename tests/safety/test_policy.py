"""Policies: order, conditions, budgets, and one clear sentence for each mistake."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import policy

from agentrl.errors import ConfigError
from agentrl.safety.globs import path_matches
from agentrl.safety.loading import SHIPPED, check_policy, read_policy, run_examples
from agentrl.safety.policy import Action, ArgumentRule, Rule
from agentrl.safety.shell import UNKNOWN, Access


@pytest.mark.parametrize("name", SHIPPED)
def test_the_examples_of_shipped_policies_hold(name):
    results = run_examples(read_policy(name))
    assert len(results) >= 3 and all(result.passed for result in results)


MISTAKES = {
    "unknown effect": (
        {"rules": [{"id": "a", "decision": "allow", "effects": ["erase"]}]},
        "rule 'a': effects.0='erase' is unknown: use 'read', 'write', 'network' or 'irreversible'",
    ),
    "unknown decision": (
        {"rules": [{"id": "a", "decision": "permit"}]},
        "rule 'a': decision='permit' is unknown: use 'deny', 'ask' or 'allow'",
    ),
    "unknown field": (
        {"rules": [{"id": "a", "decision": "allow", "tool": "x"}]},
        "rule 'a': tool is unknown: did you mean 'tools'?",
    ),
    "no name": ({"name": None, "rules": []}, "name=None: input should be a valid string"),
    "two of one id": (
        {"rules": [{"id": "a", "decision": "allow"}, {"id": "a", "decision": "deny"}]},
        "two rules have the id 'a'",
    ),
    "contradictory budget": (
        {
            "rules": [{"id": "a", "decision": "allow"}],
            "budget": {"calls": 3, "tools": {"pay": 5}},
        },
        "budget: tools.pay=5 contradicts calls=3",
    ),
    "budget without prices": (
        {"rules": [{"id": "a", "decision": "allow"}], "budget": {"usd": 1.0}},
        "budget: usd=1.0 bounds nothing without prices",
    ),
    "negative budget": (
        {"rules": [{"id": "a", "decision": "allow"}], "budget": {"calls": -1}},
        "budget.calls=-1: input should be greater than or equal to 0",
    ),
    "bad pattern": (
        {
            "rules": [
                {"id": "a", "decision": "allow", "arguments": {"x": {"matches": "("}}},
            ]
        },
        "it is no regular expression",
    ),
    "empty range": (
        {"rules": [{"id": "a", "decision": "allow", "arguments": {"x": {"min": 3, "max": 1}}}]},
        "min=3.0 is above max=1.0, so no value can match",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(mistake):
    row, wanted = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        check_policy({"name": "p", **row}, "policy p.toml")
    assert wanted in str(raised.value) and str(raised.value).startswith("policy p.toml: ")
    assert "\n" not in str(raised.value)


def test_a_rule_that_can_never_decide_is_named(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'name = "p"\n[[rules]]\nid = "none"\ndecision = "deny"\ntools = ["pay*"]\n'
        '[[rules]]\nid = "dead"\ndecision = "allow"\ntools = ["pay_all"]\neffects = ["write"]\n'
    )
    with pytest.raises(ConfigError, match=r"rule 'dead' can never decide: rule 'none' matches"):
        read_policy(str(path))
    with pytest.raises(ConfigError, match="does not exist: use read-only"):
        read_policy("nowhere")


def test_inspects_approver_files_are_read(tmp_path):
    path = tmp_path / "approval.yaml"
    path.write_text(
        "approvers:\n  - name: human\n    tools: [pay, 'web_*']\n  - name: auto\n    tools: '*'\n"
    )
    found = read_policy(str(path))
    decided = [found.judge([Action(name, "read", {})])[0] for name in ("pay", "web_x", "look")]
    assert [one.decision for one in decided] == ["ask", "ask", "allow"]
    assert found.approval == {"kind": "terminal"}
    for text, wanted in {
        "approvers: []": "approvers is missing",
        "approvers: [{name: robot}]": "name='robot' with decision='approve' is not known",
        "approvers: [{name: auto, tools: 'bash(cmd='}]": "names arguments",
        "approvers: [{name: auto, limit: 3}]": "limit=3 is not read",
        "a: [": "is not valid YAML",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=wanted.replace("(", r"\(")):
            read_policy(str(path))


def test_a_policy_may_be_python(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from agentrl.safety.policy import SafetyPolicy, Rule\n"
        "mine = SafetyPolicy(name='mine', rules=(Rule(id='r', decision='allow'),))\n"
    )
    assert read_policy(f"{path}:mine").name == "mine"
    with pytest.raises(ConfigError, match="is NoneType, not"):
        read_policy(f"{path}:other")


# A slow evaluator, written from the words of the documentation alone.

EFFECT, TOOL = ("read", "write", "network", "irreversible"), ("a", "ab", "b")


PATHS = ("x", "d/x", "/e", UNKNOWN)


PATTERNS = ("**", "d/*", "x", "/**")


def slow(rules, actions):
    ranks = {"deny": 0, "ask": 1, "allow": 2}
    worst = "allow" if actions else "deny"
    for action in actions:
        mine = "deny"
        for decision in ("deny", "ask", "allow"):
            if any(rule.decision == decision and slow_match(rule, action) for rule in rules):
                mine = decision
                break
        worst = min(worst, mine, key=ranks.get)
    return worst


def slow_match(rule, action):
    if rule.tools and not [one for one in rule.tools if path_matches(one, action.tool)]:
        return False
    if rule.effects and action.effect not in rule.effects:
        return False
    for patterns, accesses in (
        (rule.paths, action.accesses),
        (rule.writes, [access for access in action.accesses if access.writes]),
    ):
        if not patterns:
            continue
        if rule.decision == "allow" and action.effect == "write" and not action.accesses:
            return False
        lies = [
            UNKNOWN
            if access.path == UNKNOWN
            else any(
                path_matches(one, access.path)
                and one.startswith("/") == access.path.startswith("/")
                for one in patterns
            )
            for access in accesses
        ]
        if rule.decision == "allow" and any(one is not True for one in lies):
            return False
        if rule.decision != "allow" and not any(lies):
            return False
    for name, wanted in rule.arguments.items():
        if name not in action.arguments:
            return False
        value = action.arguments[name]
        if not isinstance(value, int):
            if rule.decision == "allow":
                return False
        elif not wanted.min <= value <= wanted.max:
            return False
    return True


RULES = st.lists(
    st.fixed_dictionaries(
        {"decision": st.sampled_from(["deny", "ask", "allow"])},
        optional={
            "tools": st.lists(st.sampled_from(["a", "a*", "*", "b"]), min_size=1, max_size=2),
            "effects": st.lists(st.sampled_from(EFFECT), min_size=1, max_size=3),
            "paths": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
            "writes": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
            "arguments": st.just({"n": ArgumentRule(min=1, max=3)}),
        },
    ),
    max_size=5,
).map(lambda rows: [Rule(id=f"r{place}", **row) for place, row in enumerate(rows)])


ACTIONS = st.lists(
    st.builds(
        Action,
        st.sampled_from(TOOL),
        st.sampled_from(EFFECT),
        st.sampled_from([{}, {"n": 2}, {"n": 9}, {"n": "2"}]),
        st.lists(st.builds(Access, st.sampled_from(PATHS), st.booleans()), max_size=2).map(tuple),
    ),
    max_size=3,
)


def agree(rules, actions):
    assert policy(*rules).judge(actions)[0].decision == slow(rules, actions)


@given(RULES, ACTIONS)
@settings(max_examples=300, deadline=None)
def test_the_evaluator_agrees_with_a_slow_one(rules, actions):
    agree(rules, actions)


@pytest.mark.long
@given(RULES, ACTIONS)
@settings(max_examples=3000, deadline=None)
def test_the_same_three_thousand_times(rules, actions):
    agree(rules, actions)


def test_globs():
    table = [("*", "a", True), ("*", "a/b", False), ("**", "a/b", True), ("a/**", "ab", False)]
    table += [("a?", "ab", True), ("a.c", "abc", False), ("", "a", False)]
    for (pattern, path, wanted), _ in itertools.product(table, range(2)):
        assert path_matches(pattern, path) is wanted
