"""The report page: complete, self-contained, bounded, and deaf to whatever episodes say."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random

import pytest
from fake_run import metrics_row
from report_cases import Page, episode, report, save

from agentrl.errors import UserError
from agentrl.evaluation.stats import paired
from agentrl.records.files import MetricsWriter, write_json_atomic
from agentrl.report import viewer
from agentrl.report.page import write_report
from agentrl.trajectory import EpisodeKey
from agentrl.types import Message, Score, ToolCall

EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&\u2028'\"{{ 7*7 }}"


def test_the_page_says_what_the_run_did(run):
    page = report(*run)
    for expected in (
        "bugfix-v0",
        "seed7",
        "runs/sft/model",
        "grpo",
        "0.35",
        "0.83",
        "+0.48",
        "95 % intervals",
    ):
        assert expected in page.text
    for title in (
        "Held-out pass@1",
        "Reward",
        "Entropy",
        "KL divergence",
        "Clip fraction",
        "Response length",
    ):
        assert title in page.text
    for title in (
        "Groups without signal",
        "Gradient norm",
        "How episodes end",
        "Sampler against scorer",
    ):
        assert title in page.text
    assert "recipe.clip_high" in page.text and "0.28" in page.text
    assert "replace_line" in page.text and "max_turns" in page.text
    assert len([tag for tag, _ in page.tags if tag == "figure"]) == len(page.data["charts"]) == 16


def test_the_page_loads_nothing(run):
    page = report(*run)
    assert not [
        tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "base", "form")
    ]
    for tag, attributes in page.tags:
        assert "src" not in attributes and "srcset" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert (
        "url(" not in page.raw
        and "@import" not in page.raw
        and "http" not in page.raw.replace("http-equiv", "")
    )


def test_only_our_script_may_run(run):
    page = report(*run)
    assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
        "application/json",
        None,
    ]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    policy = next(
        a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in page.scripts[1] and "insertAdjacentHTML" not in page.scripts[1]


def test_no_text_of_a_run_becomes_markup(tmp_path, run):
    clean = report(*run)
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "config.toml").write_text(
        "".join(f"{name} = {json.dumps(EVIL)}\n" for name in ("env", "model", "seed"))
    )
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.write({"step": 0, "reward/mean": 0.5, f"end/{EVIL}": 1.0})
    evil = episode(
        text=EVIL,
        key=EpisodeKey(EVIL, 0, EVIL, 0),
        env=EVIL,
        messages=(
            Message.assistant(EVIL, ToolCall(EVIL, {EVIL: EVIL})),
            Message.tool(EVIL, ToolCall(EVIL, {})),
        ),
        score=Score(1.0, {EVIL: math.inf}, EVIL),
        artifacts={"a.py": EVIL.encode() + b"\xff"},
        side_effects={EVIL: EVIL},
    )
    save(folder, [evil])

    class Tokenizer:
        def decode(self, ids, *, skip_special_tokens):
            return EVIL + "\ud800"

    page = report(folder, Tokenizer())
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in clean.tags} | {"ul", "li"}
    assert len(page.scripts) == 2 and page.scripts[1] == clean.scripts[1]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "alert(1)" in page.text and "{{ 7*7 }}" in page.text
    (row,) = page.data["episodes"]
    (shown,) = row["side_effects"].items()
    assert shown == (EVIL, EVIL)
    assert clean.data["episodes"][0]["side_effects"] is None
    assert "Side effects: not measured." in clean.scripts[1]
    assert row["key"]["task"] == row["why"] == row["messages"][0]["content"] == EVIL
    assert page.data["vocab"]["7"] == EVIL + "\ud800"
    assert "<" not in page.scripts[0]


def test_the_page_stays_small_however_large_the_run(tmp_path):
    words = "".join(f"word{index} <b>" for index in range(500))
    big = [
        episode(
            sample,
            step=sample,
            tokens=20_000 if sample % 2 else 5_000,
            messages=(Message.user(words),) * 90,
        )
        for sample in range(20)
    ]
    save(tmp_path, big)
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(3000):
            writer.write(metrics_row(step, 3000, random.Random(step)))

    class Tokenizer:
        def decode(self, ids, *, skip_special_tokens):
            return f"token{ids[0]}<"

    page = report(tmp_path, Tokenizer())
    assert len(page.raw.encode()) < 3_000_000
    rows = page.data["episodes"]
    assert 3 <= len(rows) < 20
    assert all(
        sum(len(part["ids"]) for part in row["segments"]) <= viewer.MAX_TOKENS for row in rows
    )
    assert {row["tokens_cut"] for row in rows} == {0, 20_002}
    assert rows[0]["messages_cut"] == 10 and "characters cut" in rows[0]["messages"][0]["content"]
    assert f"{len(rows)} of 20" in page.text


def test_an_evaluation_alone_makes_a_page(tmp_path):
    summary = {
        "pass_at": {"1": 0.5, "4": 0.75},
        "ci95": {"1": [0.4, 0.6], "4": None},
        "n_tasks": 40,
    }
    write_json_atomic(
        tmp_path / "eval.json", {**summary, "env": "calc-v0", "policy": "hf:models/a", "seed": 3}
    )
    page = report(tmp_path)
    assert "calc-v0" in page.text and "policy hf:models/a seed 3" in page.text
    assert "0.50" in page.text and "pass@4 0.75" in page.text and "over 40 tasks" in page.text
    assert "Learning curves" not in page.text and page.data["episodes"] == []
    write_json_atomic(
        tmp_path / "eval.json", {"before": {**summary, "pass_at": {"1": 0.25}}, "after": summary}
    )
    assert "+0.25" in report(tmp_path).text
    write_json_atomic(tmp_path / "eval.json", {"pass_at": {"1": None}, "ci95": {"1": None}})
    assert "intervals" not in report(tmp_path).text


def test_the_counts_say_what_they_count(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 0, "eval/pass_at_1": 0.25})
        for step in (1, 2, 3):
            writer.write({"step": step, "reward/mean": 0.5, "eval/pass_at_1": 0.5})
    trained = [episode(sample, step=step) for step in (0, 1) for sample in range(3)]
    save(
        tmp_path,
        [
            *trained,
            *(
                episode(key=EpisodeKey("run", 0, "task", sample, phase="eval"))
                for sample in range(2)
            ),
        ],
    )
    page = report(tmp_path)
    assert (
        "steps 3 trained, 1 only evaluated" in page.text
        and "episodes 8, 2 of them held-out" in page.text
    )
    assert (
        "Endings recorded episodes: 8, 2 of them held-out" in page.text
        and "of 8 recorded episodes" in page.text
    )
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "episodes.jsonl").unlink()
    save(tmp_path, trained)
    assert (
        "episodes 6" in report(tmp_path).text
        and "held-out" not in report(tmp_path).text.split("Episodes")[0]
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.toml", "a = ", "is not TOML"),
        ("eval.json", "{", "is not JSON"),
        ("metrics.jsonl", "{}\n", "is not a record"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        write_report(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the folder of a run"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "is_shown"), [(4, 16, True), (10, 11, False), (10, 10, False)]
)
def test_a_headline_says_whether_anything_changed(tmp_path, before, after, is_shown):
    """Of 20 held-out tasks, the first ones pass."""
    evaluations = [[task < passed for task in range(20)] for passed in (before, after)]
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step, passed in zip((0, 4), evaluations, strict=True):
            writer.write({"step": step, "eval/pass_at_1": sum(passed) / 20})
    save(
        tmp_path,
        [
            episode(
                key=EpisodeKey("run", step, f"task-{task}", 0, phase="eval"),
                reward=float(is_passed),
            )
            for step, passed in zip((0, 4), evaluations, strict=True)
            for task, is_passed in enumerate(passed)
        ],
    )
    low, high = paired(*evaluations).ci95
    text = Page(write_report(tmp_path).read_text()).text
    assert f"change: {low:+.2f} to {high:+.2f}" in text
    assert ("do not show that anything changed" not in text) is is_shown


def test_a_headline_without_recorded_tasks_has_no_interval_of_its_change(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in (0, 4):
            writer.write({"step": step, "eval/pass_at_1": step / 10})
    text = Page(write_report(tmp_path).read_text()).text
    assert "+0.40" in text and "change:" not in text
