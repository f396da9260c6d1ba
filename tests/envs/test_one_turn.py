"""math-v0 and chat-v0: tasks, splits, rewards beside the verdict, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path

import pytest

from agentrl.envs.chat import ChatEnv
from agentrl.envs.math import Math, read_problems
from agentrl.errors import ConfigError
from agentrl.evaluation.audit import AuditPlan, audit
from agentrl.evaluation.audit.probes import probes
from agentrl.evaluation.contract import check_environment
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.registry import factory
from agentrl.types import EndReason, Message
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.named import load_rule

RULE = "def polite(prompt, answer):\n    return float(answer.startswith('Yes')) * len(prompt) / 8\n"


@pytest.fixture
def chat(tmp_path: Path) -> dict[str, str]:
    rows = [{"prompt": f"please {n:02}", "chosen": f"Yes, {n:02}."} for n in range(40)]
    rows.append({"prompt": [{"role": "user", "content": "hi 1"}, {"role": "assistant", "content": "what"}, {"role": "user", "content": "eight ch"}], "chosen": "Yes."})  # fmt: skip  # noqa: E501
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rule.py").write_text(RULE)
    return {"prompts": str(tmp_path / "prompts.jsonl"), "reward": f"{tmp_path}/rule.py:polite"}


def judged(env, task, text, end=EndReason.ANSWERED):
    said = (Message.user(task.instruction), Message.assistant(text))
    return asyncio.run(env.verifier(Submission(task, said, end)))


def test_both_keep_the_contract_and_every_promise(chat):
    for make in (factory("math-v0"), factory("chat-v0", **chat)):
        assert not [one for one in check_environment(make, n_tasks=3) if one.problem]
        result = audit(AuditPlan(make, tasks=3, attacks=probes))
        assert result["ok"], [row for row in result["rows"] if row["verdict"] == "broken"]
        assert evaluate(EvalPlan(make, "oracle", limit=4))["pass_at"]["1"] == 1.0


def test_rows_of_gsm8k_are_tasks(data_dir):
    file = str(data_dir / "math" / "gsm8k_train_200.jsonl")
    tasks = {split: list(Math(data=file).tasks(split, 0)) for split in ("train", "test")}
    assert sum(map(len, tasks.values())) == len(read_problems(file)) == 200
    assert 20 <= len(tasks["test"]) <= 60
    assert not {one.id for one in tasks["train"]} & {one.id for one in tasks["test"]}
    assert not any("<<" in str(one.oracle["answer"]) for one in tasks["train"])
    told = evaluate(EvalPlan(factory("math-v0", data=file), "oracle", limit=20))
    assert told["pass_at"]["1"] == 1.0


def test_a_file_without_problems_is_refused_and_nothing_is_made_up(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no problem: name a file with at least one row"):
        next(Math(data=str(tmp_path / "none.jsonl")).tasks("test", 0))


def test_made_up_problems_never_go_below_zero_and_repeat_none():
    tasks = list(itertools.islice(Math(largest=5).tasks("train", 0), 400))
    assert len({one.instruction for one in tasks}) == 400
    assert min(int(one.hidden["answer"]) for one in tasks) >= 0
    again = [one.id for one in itertools.islice(Math(largest=5).tasks("train", 0), 400)]
    assert again == [one.id for one in tasks]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3 + 4 = 7\n#### {}", 1.3),
        ("#### {}", 1.1),
        ("it is {}", 1.0),
        ("work\n#### 999999", 0.3),
        ("999999", 0.0),
    ],
)
def test_format_and_reasoning_earn_their_caps_and_never_the_verdict(text, reward):
    env = Math(format=0.1, reasoning=0.2)
    task = next(env.tasks("train", 0))
    score = judged(env, task, text.format(task.hidden["answer"]))
    assert score.value == pytest.approx(reward)
    assert (score.verdict >= 1) == (reward >= 1)


def test_an_answer_that_was_cut_pays(chat):
    env = ChatEnv(**chat, missing_eos=0.25)
    task = next(one for one in env.tasks("train", 0) if len(one.instruction) == 9)
    assert judged(env, task, "Yes").value == 9 / 8
    assert judged(env, task, "Yes", EndReason.MAX_TOKENS).value == 9 / 8 - 0.25
    assert judged(ChatEnv(**chat, missing_eos=0.0), task, "No", EndReason.MAX_TOKENS).value == 0


def test_a_prompt_of_several_messages_is_opened_with_all_of_them(chat):
    env = ChatEnv(**chat)
    both = [one for split in ("train", "test") for one in env.tasks(split, 1)]
    assert len(both) == 41
    env.task = next(one for one in both if one.instruction == "eight ch").view()
    assert [one.role for one in env.prompt()] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("env", "settings", "said"),
    [
        (Math, {"largest": 1}, "math-v0: largest=1 must be a whole number from 5 to 1000"),
        (Math, {"format": 2.0}, "math-v0: format=2.0 must be from 0 to 1"),
        (ChatEnv, {"missing_eos": -1.0}, "chat-v0: missing_eos=-1.0 must be at least 0"),
        (ChatEnv, {"reward": "none.py:f"}, "judge none.py:f: there is no such file"),
        (ChatEnv, {"reward": "/no/such"}, "/no/such"),
        (ChatEnv, {"reward": "some/rule.py"}, "names no function: write path/to/file.py:function"),
        (ChatEnv, {"reward": "some/rule.py:"}, "names no function: write path/to/file.py:function"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(env, settings, said):
    with pytest.raises(ConfigError) as caught:
        env(**settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


DATA = """from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Weights:
    long: float = 2.0

def rule(prompt: str, answer: str) -> float:
    return Weights().long
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DATA, ""),
        ("def rule(:", "the file cannot be loaded (SyntaxError: "),
        ("import no_such_module", "the file cannot be loaded (ModuleNotFoundError: No module"),
        ("def rule(prompt): return 1", "cannot be called with a prompt and an answer (too many"),
        ("rule = len", "cannot be called with a prompt and an answer"),
    ],
)
def test_a_rule_in_a_file_is_loaded_whole_or_refused_in_one_sentence(text, said, tmp_path):
    file = tmp_path / "rule.py"
    file.write_text(text)
    if not said:
        assert load_rule(file, "rule")("p", "a") == 2.0
        return
    with pytest.raises(ConfigError) as caught:
        load_rule(file, "rule")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "row", "said"),
    [
        (Math, {"question": "2 + 2?", "answer": "four"}, "needs a text `question`"),
        (Math, {"question": "2 + 2?", "text": "four"}, "key 'answer' is missing"),
        (ChatEnv, {"prompt": [{"role": "assistant", "content": "x"}]}, 'prompt=[{"role'),
        (ChatEnv, {"prompt": ""}, 'prompt="" must be a text'),
        (ChatEnv, {"prompt": None}, "prompt=null must be a text"),
        (ChatEnv, {"text": "x", "id": 1}, "key 'prompt' is missing (present: 'text', 'id')"),
    ],
)
def test_rows_of_another_form_are_named_by_their_line(env, row, said, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)
    told = (
        {"data": str(file)} if env is Math else {"prompts": str(file), "reward": f"{rule}:polite"}
    )
    with pytest.raises(ConfigError, match=rf"rows.jsonl, line 1: .*{re.escape(said)}"):
        next(env(**told).tasks("train", 0))
