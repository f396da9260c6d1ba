"""Evaluation: pass@k, paired comparison, the environment contract, audits and regrading.

The functions `audit` and `regrade` are imported from the modules of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.lazy import lazy_names

if TYPE_CHECKING:
    from agentrl.evaluation.compare import compare_runs as compare_runs
    from agentrl.evaluation.contract import RuleResult as RuleResult
    from agentrl.evaluation.contract import check_environment as check_environment
    from agentrl.evaluation.contract import check_named as check_named
    from agentrl.evaluation.run import EvalPlan as EvalPlan
    from agentrl.evaluation.run import EvalProgress as EvalProgress
    from agentrl.evaluation.run import evaluate as evaluate
    from agentrl.evaluation.stats import Paired as Paired
    from agentrl.evaluation.stats import PassAt as PassAt
    from agentrl.evaluation.stats import best_of_k as best_of_k
    from agentrl.evaluation.stats import majority_of_k as majority_of_k
    from agentrl.evaluation.stats import paired as paired
    from agentrl.evaluation.stats import pass_at as pass_at
    from agentrl.evaluation.stats import pass_at_k as pass_at_k
    from agentrl.evaluation.stats import pass_hat_k as pass_hat_k
    from agentrl.evaluation.stats import rate_ci as rate_ci
    from agentrl.evaluation.summary import summarize as summarize
    from agentrl.evaluation.summary import summary_lines as summary_lines
    from agentrl.evaluation.summary import task_counts as task_counts
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "compare": ("compare_runs",),
            "contract": (
                "RuleResult",
                "check_environment",
                "check_named",
            ),
            "run": (
                "EvalPlan",
                "EvalProgress",
                "evaluate",
            ),
            "stats": (
                "PassAt",
                "Paired",
                "best_of_k",
                "majority_of_k",
                "paired",
                "pass_at",
                "pass_at_k",
                "pass_hat_k",
                "rate_ci",
            ),
            "summary": (
                "summarize",
                "summary_lines",
                "task_counts",
            ),
        },
    )
