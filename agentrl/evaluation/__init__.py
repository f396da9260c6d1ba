"""Evaluation: pass@k, paired comparison, the environment contract, audits, and scores anew.

The functions `audit` and `regrade` are imported from the modules of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.lazy import lazy_names

if TYPE_CHECKING:
    from agentrl.evaluation.contract import RuleResult as RuleResult
    from agentrl.evaluation.contract import check_environment as check_environment
    from agentrl.evaluation.contract import check_named as check_named
    from agentrl.evaluation.passk import PassAt as PassAt
    from agentrl.evaluation.passk import bootstrap_ci as bootstrap_ci
    from agentrl.evaluation.passk import pass_at as pass_at
    from agentrl.evaluation.passk import pass_at_k as pass_at_k
    from agentrl.evaluation.passk import pass_hat_k as pass_hat_k
    from agentrl.evaluation.passk import summarize as summarize
    from agentrl.evaluation.passk import task_counts as task_counts
    from agentrl.evaluation.passk import wilson_ci as wilson_ci
    from agentrl.evaluation.results.compare import Paired as Paired
    from agentrl.evaluation.results.compare import compare_runs as compare_runs
    from agentrl.evaluation.results.compare import paired as paired
    from agentrl.evaluation.run import EvalPlan as EvalPlan
    from agentrl.evaluation.run import EvalProgress as EvalProgress
    from agentrl.evaluation.run import evaluate as evaluate
    from agentrl.evaluation.summary import summary_lines as summary_lines
    from agentrl.evaluation.votes import best_of_k as best_of_k
    from agentrl.evaluation.votes import majority_of_k as majority_of_k
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "results.compare": ("Paired", "compare_runs", "paired"),
            "contract": ("RuleResult", "check_environment", "check_named"),
            "passk": (
                "PassAt",
                "bootstrap_ci",
                "pass_at",
                "pass_at_k",
                "pass_hat_k",
                "summarize",
                "task_counts",
                "wilson_ci",
            ),
            "run": ("EvalPlan", "EvalProgress", "evaluate"),
            "summary": ("summary_lines",),
            "votes": ("best_of_k", "majority_of_k"),
        },
    )
