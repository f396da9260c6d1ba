"""Answers of a model that a judge ranks: which become pairs, and what a judge may say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_branch
from preference_cases import planted_pairs, tiny_policy, write_rows

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.offline import stage
from agentrl.trainers.offline.sampling import Replies, SampledAnswer, best_against_worst, open_judge
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import held_out_prompts, run_stage
from agentrl.types import Message

ASKED = (Message.user("Hi?"),)


def answers(*texts: str) -> list[SampledAnswer]:
    return [
        SampledAnswer(ASKED, Message.assistant(text), True, make_branch(2, (2, 0)))
        for text in texts
    ]


def test_the_best_answer_stands_against_the_worst_and_ties_give_no_pair() -> None:
    groups = [answers("aa", "aaaa", "a"), answers("bb", "bb")]
    (pair,) = best_against_worst(groups, [2.0, 4.0, 1.0, 2.0, 2.0])
    assert pair.chosen.messages[0].content == "aaaa" and pair.rejected.messages[0].content == "a"
    assert pair.margin == 3.0
    (pair,) = best_against_worst(groups, [2.0, None, 1.0, 2.0, None])
    assert pair.chosen.messages[0].content == "aa", "what was not judged is neither best nor worst"


def test_held_out_prompts_whose_answers_tie_stop_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(prompt, answer):\n    return len(answer)\n")
    data = {"files": [write_rows(tmp_path / "pairs.jsonl", planted_pairs()[:8])], "held_out": 0.25}
    row = {"stage": "preference", "model": tiny_policy(), "data": data, "steps": 1}
    row |= {"sample": {"answers": 2, "judge": f"{rule}:rule"}, "card": {"prompts": 0}}
    settings = StageSettings.model_validate(row)
    apart = held_out_prompts(settings)

    def answered(model: Any, chat: Any, prompts: Any, how: Any, seed: int) -> Any:
        texts = {prompt: ("a", "b" if prompt in apart else "bb") for prompt in prompts}
        return [[replace(one, prompt=p) for one in answers(*texts[p])] for p in prompts]

    monkeypatch.setattr(stage, "answers_to", answered)
    found = run_stage(settings, tmp_path / "run")
    assert len(apart) == 2 and found["data"]["held_out_rows"] == 0
    assert found["data"]["train_rows"] == 6 and found["before"] == {} == found["after"]
    rule.write_text("def rule(prompt, answer):\n    return 0\n")
    with pytest.raises(UserError, match="prefers none of the answers to 6 prompts"):
        run_stage(settings, tmp_path / "none")


@pytest.mark.parametrize("wrong", ["math.nan", "math.inf"])
def test_a_judge_that_gives_no_number_is_named(wrong: str, tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(f"import math\n\ndef rule(prompt, answer):\n    return {wrong}\n")
    judge = open_judge(f"{rule}:rule")
    with pytest.raises(UserError, match=rf"rule\.py:rule gave {wrong[5:]} for an answer"):
        judge([(ASKED, Message.assistant("a"))], Replies())
    rule.write_text("import math\n\ndef rule(prompt, answer):\n    return -math.inf\n")
    assert open_judge(f"{rule}:rule")([(ASKED, Message.assistant("a"))], Replies()) == [-math.inf]


def test_a_rule_that_raises_is_named(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(prompt, answer):\n    return {}['x']\n")
    with pytest.raises(UserError, match=r"rule\.py:rule failed: KeyError: 'x'"):
        open_judge(f"{rule}:rule")([(ASKED, Message.assistant("a"))], Replies())


def test_a_judge_that_is_a_file_alone_is_told_to_name_its_function() -> None:
    with pytest.raises(ConfigError, match=r"'rule.py' names no function: write path/to/file.py:f"):
        open_judge("rule.py")
