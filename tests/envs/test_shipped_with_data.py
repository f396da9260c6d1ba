"""Environments that read a folder of data: the contract, the audit, and scores anew."""

import pytest

from agentrl.evaluation.audit import AuditPlan, audit
from agentrl.evaluation.audit.probes import probes
from agentrl.evaluation.contract import check_environment
from agentrl.evaluation.regrade import RegradePlan, regrade
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.registry import factory

FOLDERS = {"desk-v0": "tools/tau_retail", "inject-v0": "safety/agentdojo"}


@pytest.fixture(params=FOLDERS)
def make(request, data_dir):
    return factory(request.param, data=str(data_dir / FOLDERS[request.param]))


def test_the_contract_is_kept(make):
    findings = check_environment(make, n_tasks=3)
    assert not [finding for finding in findings if finding.problem]


def test_every_promise_holds(make):
    result = audit(AuditPlan(make, tasks=3, attacks=probes))
    assert result["ok"], [row for row in result["rows"] if row["verdict"] == "broken"]


@pytest.mark.parametrize("policy", ["oracle", "noop"])
def test_a_run_keeps_its_scores(make, policy, tmp_path):
    told = evaluate(EvalPlan(make, policy, limit=6, out=tmp_path))
    assert told["pass_at"]["1"] == float(policy == "oracle")
    assert told["side_effects"]["rate"] == 0.0
    result = regrade(RegradePlan(tmp_path))
    assert (result["n_regraded"], result["n_changed"]) == (6, 0)


def test_a_safety_policy_is_reached_by_its_name(data_dir):
    make = factory("inject-v0", data=str(data_dir / FOLDERS["inject-v0"]), suite="banking")
    told = evaluate(EvalPlan(make, "oracle", policy_file="lockdown"))
    figures = told["injection"]
    assert figures["attacked"] == 78 and figures["exposed"] == 66
    assert figures["attack_success"]["value"] == figures["false_block"]["value"] == 0.0
    assert figures["benign_utility"]["value"] == figures["utility_under_attack"]["value"] == 1.0
