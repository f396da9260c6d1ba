"""`agentrl label`: what follows from each turn, counted; what infrastructure failed is no number;
and labels that were interrupted go on.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import (
    FakeEngine,
    last_json,
    play_one,
    process,
    tiny_model_folder,
    wait_for,
)
from preference_cases import app

from agentrl.chat.settings import ChatSettings
from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_tokenizer
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation import label as turn_labels
from agentrl.evaluation.label import LABELS, LabelPlan, label_turns
from agentrl.policies.base import TokenPolicy
from agentrl.records.files import EpisodeWriter, read_plain_rows
from agentrl.registry import factory
from agentrl.rollout.play import play as real_play
from agentrl.safety.policy import Rule, RuleDecision, SafetyPolicy
from agentrl.specs import GuardSpec
from agentrl.trajectory import Segment
from agentrl.types import EndReason, Message, Score, ToolCall
from benchmarks.experiments.process_rewards import right_turns, values_of

SHORT = f"{Path(__file__).parents[1]}/support/toy_envs.py:Terse"
MODEL = f"hf:{tiny_model_folder()}"
CALL = '<tool_call>\n{{"name": "calculate", "arguments": {}}}\n</tool_call>'


def recorded(folder: Path, count: int = 3) -> Path:
    """A run of calc-v0 in which every episode but the second is right, two calls and an answer."""
    env = factory("calc-v0")()
    chat = Chat(load_tokenizer(tiny_model_folder()))
    stop = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with EpisodeWriter(folder / "episodes.jsonl") as writer:
        for number, task in enumerate(itertools.islice(env.tasks("train", 0), count)):
            said = [CALL.format(json.dumps(one["arguments"])) for one in task.oracle["calls"]]
            said.append(task.oracle["answer"] if number != 1 else "none")
            turns = [[*chat.tokenizer.encode(one, add_special_tokens=False), stop] for one in said]
            policy = TokenPolicy(FakeEngine(*turns, stop_ids=chat.stop_ids), chat)
            episode = play_one(factory("calc-v0"), policy, task)
            key = episode.key._replace(run="calc-v0/hf:x/train/0")
            writer.write(replace(episode, key=key))
    return folder


def test_every_turn_is_labelled(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    told: list[tuple[int, int]] = []
    plan = LabelPlan(run, MODEL, tmp_path / "labels", completions=2, env=SHORT)
    found = label_turns(plan, lambda done, total: told.append((done, total)))
    assert told[0] == (0, 12) and told[-1] == (12, 12)  # three episodes, two turns each, two plays
    rows = {row["task"]: row for row in read_plain_rows(tmp_path / "labels" / LABELS)}
    assert [row["scored"] for row in rows.values()] == [[2, 2, 1]] * 3
    # The model knows nothing: only the last turn, whose outcome is known, can be right.
    assert sorted(row["labels"] for row in rows.values()) == [[0, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert {len(row["messages"]) - row["opening"] for row in rows.values()} == {5}
    assert (found["n_turns"], found["n_completions"], found["n_unknown"]) == (9, 12, 0)
    assert found["mean"] == pytest.approx(2 / 9)
    assert json.loads((tmp_path / "labels/label.json").read_text()) == found


def test_labels_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    plan = LabelPlan(run, MODEL, tmp_path / "labels", completions=2, env=SHORT)
    whole = label_turns(plan)
    path = tmp_path / "labels" / LABELS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40])
    told: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="torn"):
        assert label_turns(plan, lambda done, total: told.append((done, total))) == whole
    assert told[0] == (0, 8) and len(read_plain_rows(path)) == 3
    with pytest.raises(ConfigError, match="other completions"):
        label_turns(LabelPlan(run, MODEL, tmp_path / "labels", completions=3, env=SHORT))


def test_what_infrastructure_failed_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path / "run", 1)

    async def play(setting, task, key):
        played = await real_play(setting, task, key)
        if len(played.trajectories[0].segments) > 4:  # it went on after the second turn
            score, end = Score.failed("lost"), EndReason.SANDBOX_LOST
            return replace(played, score=score, end=end, failure="lost")
        return played

    monkeypatch.setattr(turn_labels, "play", play)
    found = label_turns(LabelPlan(run, MODEL, tmp_path / "labels", completions=2, env=SHORT))
    (row,) = read_plain_rows(tmp_path / "labels" / LABELS)
    assert row["labels"] == [0.0, None, 1.0] and row["failed"] == [0, 2, 0]
    assert (found["n_unknown"], found["n_failed_infra"], found["mean"]) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"policy": "oracle"}, "cannot go on from recorded tokens: use hf:MODEL"),
        ({"completions": 0}, "--completions 0 must be at least 1"),
        ({"limit": -1}, "--limit -1 must not be negative"),
        ({"run": Path("nowhere")}, "nowhere holds no episodes.jsonl"),
    ],
)
def test_what_cannot_be_labelled_is_refused(
    more: dict[str, object], said: str, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", 1)
    row = {"run": run, "policy": MODEL, "out": tmp_path / "labels", **more}
    with pytest.raises(ConfigError, match=said):
        label_turns(LabelPlan(**row))  # type: ignore[arg-type]


def test_episodes_without_tokens_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 1)
    (episode,) = turn_labels.read_episodes(run / "episodes.jsonl").values()
    with EpisodeWriter(run / "episodes.jsonl") as writer:
        writer.write(replace(episode, trajectories=()))
    with pytest.raises(UserError, match="none of 1 episodes can be labelled: 1 its policy left no"):
        label_turns(LabelPlan(run, MODEL, tmp_path / "labels"))
    assert not (tmp_path / "labels").exists()


def test_no_denied_call_runs_when_a_run_is_labelled(tmp_path: Path) -> None:
    """Neither in the turns that are played again nor in those that follow."""
    run, mark = tmp_path / "run", tmp_path / "sent"
    bank = f"{Path(__file__).parents[1]}/support/toy_envs.py:Bank"
    deny = SafetyPolicy(name="p", rules=(Rule(id="no", decision="deny", tools=("send",)),))
    chat = Chat(load_tokenizer(tiny_model_folder()))
    stop = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    sent = json.dumps({"name": "send", "arguments": {"to": str(mark)}})
    call = f"<tool_call>\n{sent}\n</tool_call>"
    turns = [[*chat.tokenizer.encode(o, add_special_tokens=False), stop] for o in (call, "done")]
    make, guard = factory(bank), GuardSpec.of(deny)
    policy = TokenPolicy(FakeEngine(*turns, stop_ids=chat.stop_ids), chat)
    episode = play_one(make, policy, next(iter(make().tasks("train", 0))), guard=guard)
    with EpisodeWriter(run / "episodes.jsonl") as writer:
        writer.write(replace(episode, key=episode.key._replace(run="bank/hf:x/train/0")))
    plan = LabelPlan(run, MODEL, tmp_path / "labels", completions=2, env=bank)
    with pytest.raises(ConfigError, match="a safety policy that it does not record"):
        label_turns(plan)
    (run / "plan.json").write_text(json.dumps({"safety": deny.model_dump(mode="json")}))
    assert label_turns(plan)["n_completions"] == 2
    allow = replace_rule(deny, "allow")
    (run / "plan.json").write_text(json.dumps({"safety": allow.model_dump(mode="json")}))
    found = label_turns(replace(plan, out=tmp_path / "others"))
    assert (found["n_completions"], found["n_failed_infra"], found["n_unknown"]) == (0, 2, 1)
    (run / "plan.json").unlink()
    (run / "config.toml").write_text('[safety]\npolicy = "rules.py:OWN"\n')
    with pytest.raises(ConfigError, match="which a record may not run"):
        label_turns(plan)
    assert not mark.exists()


def replace_rule(policy: SafetyPolicy, decision: RuleDecision) -> SafetyPolicy:
    rule = policy.rules[0].model_copy(update={"decision": decision})
    return policy.model_copy(update={"rules": (rule,)})


def test_another_answer_than_recorded_is_met_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path / "run", 1)
    (episode,) = turn_labels.read_episodes(run / "episodes.jsonl").values()
    messages = [replace(m, content="x") if m.role == "tool" else m for m in episode.messages]
    with EpisodeWriter(run / "episodes.jsonl") as writer:
        writer.write(replace(episode, messages=tuple(messages)))
    played = []

    async def play(setting, task, key):
        played.append(key)
        return await real_play(setting, task, key)

    monkeypatch.setattr(turn_labels, "play", play)
    monkeypatch.setattr(turn_labels, "CONCURRENCY", 1)
    found = label_turns(LabelPlan(run, MODEL, tmp_path / "labels", completions=8, env=SHORT))
    assert (len(played), found["n_failed_infra"], found["n_unknown"]) == (1, 16, 2)


def test_labels_belong_to_episodes_and_not_to_a_path(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 1)
    plan = LabelPlan(run, MODEL, tmp_path / "labels", completions=1, env=SHORT)
    label_turns(plan)
    moved = run.rename(tmp_path / "moved")
    told: list[tuple[int, int]] = []
    plan = replace(plan, run=moved / "episodes.jsonl")
    label_turns(plan, lambda done, total: told.append((done, total)))
    assert told == []
    (episode,) = turn_labels.read_episodes(moved / "episodes.jsonl").values()
    with EpisodeWriter(moved / "episodes.jsonl") as writer:
        writer.write(replace(episode, score=Score(0.0)))
    with pytest.raises(ConfigError, match="labels of another episode calc-v0/hf:x/train/0/0/"):
        label_turns(plan)


def test_a_refused_folder_costs_no_model_and_what_is_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LabelPlan(recorded(tmp_path / "run", 1), MODEL, tmp_path / "out", 1, env=SHORT)
    opened, closed = [], []
    real_open, real_close = turn_labels.open_policy, turn_labels.close_policy
    monkeypatch.setattr(turn_labels, "open_policy", lambda *a: (opened.append(1), real_open(*a))[1])
    monkeypatch.setattr(turn_labels, "close_policy", lambda p: (closed.append(1), real_close(p))[1])
    label_turns(plan)
    with pytest.raises(ConfigError, match=r"holds labels with other completions \(1, not 3\)"):
        label_turns(replace(plan, completions=3))
    assert (len(opened), len(closed)) == (1, 1)

    async def play(setting, task, key):
        raise UserError("the template takes no such turn")

    monkeypatch.setattr(turn_labels, "play", play)
    with pytest.raises(UserError, match="the template takes no such turn"):
        label_turns(replace(plan, out=tmp_path / "others"))
    assert (len(opened), len(closed)) == (2, 2)


def test_messages_of_an_assistant_in_the_opening_are_no_turns(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 1)
    (episode,) = turn_labels.read_episodes(run / "episodes.jsonl").values()
    said = (*episode.messages[:1], Message.assistant("yes?"), Message.user("now"))
    messages = (*said, *episode.messages[1:])
    chat = Chat(load_tokenizer(tiny_model_folder()))
    opening = next(i for i, one in enumerate(messages) if one.tool_calls)
    ids = tuple(chat.prompt_ids(messages[:opening], factory(SHORT)().tools))
    branch = episode.trajectories[0]
    branch = replace(branch, segments=(Segment.prompt(ids), *branch.segments[1:]))
    episode = replace(episode, messages=messages, trajectories=(branch,))
    with EpisodeWriter(run / "episodes.jsonl") as writer:
        writer.write(episode)
    label_turns(LabelPlan(run, MODEL, tmp_path / "labels", completions=1, env=SHORT))
    (row,) = read_plain_rows(tmp_path / "labels" / LABELS)
    assert (row["opening"], len(row["labels"])) == (opening, 3)


def test_another_tokenizer_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    chat = ChatSettings(template=str(tmp_path / "other.jinja"))
    text = load_tokenizer(tiny_model_folder()).chat_template
    (tmp_path / "other.jinja").write_text(f"{{{{ 'Hello.' }}}}{text}")
    plan = LabelPlan(run, MODEL, tmp_path / "labels", env=SHORT, chat=chat)
    with pytest.raises(UserError, match=r"none of 3 .* 3 sampled with another tokenizer or temp"):
        label_turns(plan)
    assert not (tmp_path / "labels").exists()


def test_the_program_labels_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run", 1)
    words = ("label", run, "--policy", MODEL, "--completions", "1", "--env", SHORT)
    assert app(*words, "--out", tmp_path / "labels", "--json") == 0
    assert last_json(capsys.readouterr().out)["n_turns"] == 3
    assert app(*words, "--out", tmp_path / "labels") == 0
    assert (
        "labelled 3 turns of 1 episodes: mean label 0.333, by 2 completions"
        in capsys.readouterr().out
    )


def test_the_experiment_knows_right_turns() -> None:
    task = next(factory("calc-v0", operations=2)().tasks("train", 0))
    calls = [ToolCall(row["name"], row["arguments"]) for row in task.oracle["calls"]]
    first, second = (str(value) for value in values_of(task))

    def talk(*said: str) -> list[bool]:
        messages = [Message.user(task.instruction)]
        for call, text in zip(calls, said, strict=False):
            messages += [Message("assistant", "", (call,)), Message.tool(text, call)]
        return right_turns(task, [*messages, Message.assistant(said[-1])], 1)

    assert talk(first, second, second) == [True, True, True]
    assert talk("0.5", second, "no number") == [False, False, False]
    assert talk(first, first + "0", second) == [True, False, True]


@pytest.mark.long
def test_an_interrupt_leaves_whole_rows(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    words = ("label", run, "--policy", MODEL, "--completions", "500", "--out", tmp_path / "labels")
    with process(sys.executable, "-m", "agentrl.cli", *map(str, words)) as labelling:
        wait_for(lambda: (tmp_path / "labels" / LABELS).exists())
        labelling.send_signal(signal.SIGINT)
        assert labelling.wait(60) == 130
    assert len(read_plain_rows(tmp_path / "labels" / LABELS)) < 3
