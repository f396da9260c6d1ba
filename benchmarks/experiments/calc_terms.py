"""calc-v0 with a score of two named terms, as GDPO needs: the answer, and readable calls."""

from __future__ import annotations

from typing import ClassVar

from agentrl.envs.calc import Calculator
from agentrl.verifiers.answers.text import numeric
from agentrl.verifiers.base import Verifier
from agentrl.verifiers.combine import weighted
from agentrl.verifiers.shaping import format_reward, shaped


class CalcTerms(Calculator):
    """The same tasks, tools and verdict."""

    id: ClassVar[str] = "calc-terms-v0"
    verifier: Verifier = shaped(weighted({"answer": (numeric(), 1.0)}), format_reward())
