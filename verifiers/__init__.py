"""Verifiers: a finished episode in, a Score out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.lazy import lazy_names

if __name__ == "verifiers":
    raise ImportError("import agentrl.verifiers, not verifiers")

if TYPE_CHECKING:
    from agentrl.verifiers.answers.math import math_answer as math_answer
    from agentrl.verifiers.answers.text import exact_match as exact_match
    from agentrl.verifiers.answers.text import numeric as numeric
    from agentrl.verifiers.answers.text import on_answer as on_answer
    from agentrl.verifiers.base import Submission as Submission
    from agentrl.verifiers.base import Verifier as Verifier
    from agentrl.verifiers.base import grade as grade
    from agentrl.verifiers.code.admission import admit as admit
    from agentrl.verifiers.code.hidden_tests import hidden_tests as hidden_tests
    from agentrl.verifiers.combine import all_of as all_of
    from agentrl.verifiers.combine import ensemble_lower as ensemble_lower
    from agentrl.verifiers.combine import ensemble_min as ensemble_min
    from agentrl.verifiers.combine import first_of as first_of
    from agentrl.verifiers.combine import gated as gated
    from agentrl.verifiers.combine import has_hidden as has_hidden
    from agentrl.verifiers.combine import if_submitted as if_submitted
    from agentrl.verifiers.combine import remembered as remembered
    from agentrl.verifiers.combine import weighted as weighted
    from agentrl.verifiers.models.agreement import agreement as agreement
    from agentrl.verifiers.models.agreement import cohen_kappa as cohen_kappa
    from agentrl.verifiers.models.judge import Criterion as Criterion
    from agentrl.verifiers.models.judge import asks as asks
    from agentrl.verifiers.models.judge import compare as compare
    from agentrl.verifiers.models.judge import pairwise as pairwise
    from agentrl.verifiers.models.judge import rubric as rubric
    from agentrl.verifiers.models.process_reward import ProcessRewardModel as ProcessRewardModel
    from agentrl.verifiers.models.reward_model import RewardModel as RewardModel
    from agentrl.verifiers.process import Turn as Turn
    from agentrl.verifiers.process import each_turn as each_turn
    from agentrl.verifiers.process import with_process_rewards as with_process_rewards
    from agentrl.verifiers.shaping import Term as Term
    from agentrl.verifiers.shaping import format_reward as format_reward
    from agentrl.verifiers.shaping import length_penalty as length_penalty
    from agentrl.verifiers.shaping import repetition_penalty as repetition_penalty
    from agentrl.verifiers.shaping import shaped as shaped
    from agentrl.verifiers.state.stores import file_state as file_state
    from agentrl.verifiers.state.stores import json_state as json_state
    from agentrl.verifiers.state.stores import sqlite_state as sqlite_state
    from agentrl.verifiers.state.tool_calls import tool_calls as tool_calls
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "answers.math": ("math_answer",),
            "answers.text": ("exact_match", "numeric", "on_answer"),
            "base": ("Submission", "Verifier", "grade"),
            "code.admission": ("admit",),
            "code.hidden_tests": ("hidden_tests",),
            "combine": (
                "all_of",
                "ensemble_lower",
                "ensemble_min",
                "first_of",
                "gated",
                "has_hidden",
                "if_submitted",
                "remembered",
                "weighted",
            ),
            "models.agreement": ("agreement", "cohen_kappa"),
            "models.judge": ("Criterion", "asks", "compare", "pairwise", "rubric"),
            "models.process_reward": ("ProcessRewardModel",),
            "models.reward_model": ("RewardModel",),
            "process": ("Turn", "each_turn", "with_process_rewards"),
            "shaping": ("Term", "format_reward", "length_penalty", "repetition_penalty", "shaped"),
            "state.stores": ("file_state", "json_state", "sqlite_state"),
            "state.tool_calls": ("tool_calls",),
        },
    )
