"""Evaluate two policies without a model: the reference passes every task, doing nothing none."""

from __future__ import annotations

from agentrl.evaluation import EvalPlan, evaluate
from agentrl.registry import factory

if __name__ == "__main__":
    for policy in ("oracle", "noop"):
        plan = EvalPlan(factory("calc-v0", operations=3), policy=policy, split="test", limit=50)
        result = evaluate(plan)
        low, high = result["ci95"]["1"]
        print(
            f"{policy}: pass@1 {result['pass_at']['1']:.3f} (95 % interval {low:.3f} to {high:.3f})"
        )
        print(
            f"  {result['n_tasks']} tasks, {result['n_failed_infra']} failed by infrastructure,"
            f" {result['end_reasons']}"
        )
