"""What the page of a run shows of safety: rates, rules, decisions."""

from __future__ import annotations

import re
from functools import partial

import pytest
from helpers import play_one
from report_cases import report

from agentrl.evaluation.stats import rate_ci
from agentrl.records.files import EpisodeWriter


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A gullible agent, unattacked and attacked, under a policy that lets some of it through."""
    from office import GULLIBLE, Office

    from agentrl.safety.loading import read_policy
    from agentrl.specs import GuardSpec

    folder = tmp_path_factory.mktemp("guarded")
    guard = GuardSpec.of(read_policy("lockdown"))
    with EpisodeWriter(folder / "episodes.jsonl") as writer:
        for attacked in (False, True):
            for task in Office(attacked).tasks("test", 0):
                make = partial(Office, attacked)
                writer.write(play_one(make, GULLIBLE, task, guard=guard))
    return report(folder)


def test_rates_and_rules_stand_on_the_page_of_a_run(guarded):
    text = guarded.text
    solved = "–".join(f"{100 * end:.1f}" for end in rate_ci([1] * 10 + [0] * 2))
    assert f"unattacked tasks solved 83.3 % {solved} % 12" in text
    assert re.search(r"… state deleted 3\.7 % [\d.]+–[\d.]+ % 108", text)
    assert "goals of attackers reached, of episodes that saw the attack" in text
    assert "deny said-by-others 86 74" in text


def test_an_episode_shows_its_decisions_with_rules_taint_and_the_injected_text(guarded):
    rows = guarded.data["episodes"]
    stopped = next(row for row in rows if "stopped" in row["tags"])
    denied = next(event for event in stopped["events"] if event["verdict"] == "deny")
    assert denied["rule"] == "said-by-others" and denied["taint"]
    changed = next(row for row in rows if "side effect" in row["tags"])
    assert changed["side_effects"] and changed["injection"]["reached"]
    assert "INSTRUCTION" in changed["injection"]["payload"]
    assert any(row["injection"] is None for row in rows)


def test_a_page_of_a_run_without_safety_says_nothing_of_it(run):
    assert 'aria-label="Safety"' not in report(run[0]).raw
