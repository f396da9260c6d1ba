"""The report page: complete, self-contained, bounded, and deaf to whatever episodes say."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser

import pytest
from fake_run import metrics_row, write_fake_run

from agentrl.errors import UserError
from agentrl.records.files import EpisodeWriter, MetricsWriter, write_json_atomic
from agentrl.report import panels, viewer
from agentrl.report.charts import Chart, Series, format_number, nice_ticks, svg, thin
from agentrl.report.page import duration, write_report
from agentrl.report.signs import alarms, coverage, find_signs
from agentrl.trajectory import Episode, EpisodeKey, Segment, Trajectory
from agentrl.types import EndReason, Message, Score, TaskView, ToolCall

EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&\u2028'\"{{ 7*7 }}"


class Page(HTMLParser):
    """Tags, attributes and texts of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.raw = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def data(self):
        return json.loads(self.scripts[0])


def report(folder, tokenizer=None):
    path = write_report(folder, tokenizer)
    assert path == folder / "report.html"
    return Page(path.read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "seed7"
    return folder, write_fake_run(folder)


def episode(
    sample=0,
    text="hi",
    *,
    step=0,
    reward: float | None = 1.0,
    end=EndReason.ANSWERED,
    tokens=3,
    **changes,
):
    prompt = Segment.prompt(range(tokens))
    fields = {
        "key": EpisodeKey("run", step, "task", sample),
        "env": "e-v0",
        "task": TaskView(id="task", instruction="do"),
        "start": "",
        "messages": (Message.user("do"), Message.assistant(text)),
        "end": end,
        "score": Score.failed("gone") if reward is None else Score(reward),
        "trajectories": (Trajectory((prompt, Segment.sampled([7, 8], [-0.25, -1.5], 4, "stop"))),),
    }
    return Episode(**{**fields, **changes})


def save(folder, episodes):
    with EpisodeWriter(folder / "episodes.jsonl") as writer:
        for item in episodes:
            writer.write(item)


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


def test_tokens_carry_their_author_text_and_logprob(run):
    folder, words = run
    page = report(folder, words)
    row = next(row for row in page.data["episodes"] if len(row["branches"]) == 2)
    first, second = row["branches"]
    assert second["shared"] == 3 and second["segments"][:3] == first["segments"][:3]
    kinds = [row["segments"][index]["kind"] for index in first["segments"]]
    assert kinds[:3] == ["p", "s", "o"]
    sampled = row["segments"][first["segments"][1]]
    assert len(sampled["logprobs"]) == len(sampled["ids"]) and sampled["finish"] == "stop"
    text = "".join(page.data["vocab"][str(token)] for token in sampled["ids"])
    assert "<tool_call>" in text and text.endswith("<|end|>")


def test_a_page_without_tokenizer_says_so(run):
    folder, words = run
    assert report(folder).data["vocab"] == {} and "tokens show as ids" in report(folder).text
    assert "tokens show as ids" not in report(folder, words).text


def test_the_newest_checkpoint_tells_token_texts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    save(tmp_path, [episode()])
    for step, text in ((9, "old"), (10, "new")):
        folder = tmp_path / "checkpoints" / f"step_{step}" / "model"
        folder.mkdir(parents=True)
        model = tokenizers.models.WordLevel({text: 7, "\u2581b": 8, "[UNK]": 9}, unk_token="[UNK]")
        tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    vocab = report(tmp_path).data["vocab"]
    assert vocab["7"] == "new" and vocab["8"].endswith("b")


def test_parts_of_characters_show_as_pieces():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    ids = made.encode("é a").ids
    texts = viewer.token_texts([{"segments": [{"ids": ids}]}], made)
    assert [texts[str(token)] for token in ids] == ["Ã", "©", " ", "a"]


def test_episodes_are_chosen_widely():
    lights = []
    for step in range(50):
        for sample in range(4):
            end, reward = EndReason.ANSWERED, float(sample == 0)
            if sample == 3 and step % 10 == 5:
                end, reward = EndReason.MAX_TURNS, 0.0
            if sample == 2 and step % 10 == 6:
                end, reward = EndReason.SANDBOX_LOST, None
            key = EpisodeKey("run", step, "task", sample, phase="eval" if sample == 1 else "train")
            lights.append(viewer.Light.of(episode(key=key, reward=reward, end=end)))
    chosen = viewer.choose(lights)
    assert len(chosen) == 60 and chosen == viewer.choose(lights) != viewer.choose(lights, seed=1)
    tags = {tag for reasons in chosen.values() for tag in reasons}
    assert tags == {
        "first step",
        "last step",
        "top reward",
        "lowest reward",
        "random",
        "truncated",
        "infra",
        "held-out",
    }
    assert {key.step for key, reasons in chosen.items() if "last step" in reasons} == {49}
    assert len({key.step for key in chosen}) > 20
    assert len(viewer.choose(lights[:7])) == 7 and viewer.choose([]) == {}


def test_the_last_record_of_a_key_is_shown(tmp_path):
    save(tmp_path, [episode(text="first try", reward=0.0), episode(text="after resume")])
    (row,) = report(tmp_path).data["episodes"]
    assert row["messages"][1]["content"] == "after resume" and row["reward"] == 1.0


def test_tool_outcomes_are_read_off_the_fixed_form():
    call = ToolCall("grep", {})
    answers = [
        "ok",
        "error: timeout: grep took longer than 3 s",
        "error: no such word",
        "error: tool_error: KeyError: x",
    ]
    light = viewer.Light.of(episode(messages=tuple(Message.tool(text, call) for text in answers)))
    assert light.calls == {"grep": 4} and light.errors == {"grep": 2}


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


def test_gaps_and_nonfinite_metrics_are_drawn_as_gaps(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(12):
            writer.write(
                {"step": step, "policy/kl": math.nan if step == 6 else 0.1 * step, "note": "text"}
            )
    page = report(tmp_path)
    assert "policy/kl was not finite at 1 step, first at step 6." in page.text
    points = page.data["charts"][0][0]["points"]
    assert points[6] == [6, None] and points[5] == [5, 0.5]
    assert page.raw.count('class="line') == 2


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


def rows(**columns):
    return [{"step": step} | {key: f(step) for key, f in columns.items()} for step in range(20)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"reward/mean": lambda s: s / 20, "eval/pass_at_1": lambda s: 0.3}, "while held-out pass@1 changed by"),
        ({"reward/mean": lambda s: 0.9 * (s > 8), "eval/pass_at_1": lambda s: s}, "stepped up by 0.90 at step 9"),
        ({"groups/no_signal": lambda s: 0.9, "groups/all_pass": lambda s: 0.1, "groups/all_fail": lambda s: 0.8},
         r"90% of the last groups give no signal \(10% all solved, 80% all failed\)"),
        ({"policy/entropy": lambda s: 0.6 / (s + 1)}, "Entropy fell"),
        ({"length/sampled_mean": lambda s: 50 + 10 * s}, "Responses grew from 70 to 220"),
        ({"policy/clip_low": lambda s: 0.2, "policy/clip_high": lambda s: 0.2}, "40% of tokens are clipped"),
        ({"parity/gap_mean": lambda s: 0.45}, "differ by up to 0.45 nats"),
        ({"format/bad_calls_rate": lambda s: 0.5}, "50% of the last episodes hold"),
        ({}, "measured fewer than twice"),
        ({"policy/kl": lambda s: 0.01 + 0.4 * (s == 12)}, "KL to the sampler rose to 0.41 nats per token at step 12"),
        ({"policy/ref_kl": lambda s: 0.02 + 2 * (s > 15)}, "KL to the reference rose to 2.02 nats"),
        ({"pass/train": lambda s: 0.9, "eval/pass_at_1": lambda s: 0.5}, "90% of the last training episodes pass and 50% of"),
    ],
)  # fmt: skip
def test_warning_signs(columns, says):
    assert any(re.search(says, sentence) for sentence in find_signs(rows(**columns)))


def test_alarms_are_the_signs_of_a_run_that_still_trains():
    assert alarms(rows(**{"policy/kl": lambda s: 0.01})) == {}
    loud = rows(
        **{
            "reward/mean": lambda s: 0.9 * (s > 8),
            "length/sampled_mean": lambda s: 50 + 10 * s,
            "policy/kl": lambda s: 1.0 * (s > 8),
            "pass/train": lambda s: 1.0,
            "eval/pass_at_1": lambda s: 0.1,
        }
    )
    assert alarms(loud).keys() == {"reward_jump", "length", "kl", "gap"}
    assert set(alarms(loud).values()) <= set(find_signs(loud))


def test_a_healthy_run_shows_no_sign():
    healthy = [metrics_row(step, 40, random.Random(step)) for step in range(41)]
    assert find_signs(healthy) == []


def test_thinning_keeps_spikes_and_gaps():
    points = [(float(step), 0.0) for step in range(10_000)]
    points[5003], points[7777] = (5003.0, 9.0), (7777.0, math.nan)
    kept = thin(points)
    assert (
        len(kept) <= 410 and (5003.0, 9.0) in kept and any(math.isnan(value) for _, value in kept)
    )
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_ticks_and_numbers():
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(-3e-7, 1e-6) == pytest.approx([0, 5e-7, 1e-6])
    shown = {
        0: "0",
        0.8251: "0.825",
        12.34: "12.3",
        123.9: "124",
        7181: "7,181",
        1.2e-7: "1.2e-7",
        3e6: "3e6",
        1: "1",
    }
    assert {value: format_number(value) for value in shown} == shown
    assert (format_number(None), format_number(math.nan)) == ("–", "nan")
    assert [duration(seconds) for seconds in (9.6, 75, 7320)] == [
        "10 s",
        "1 min 15 s",
        "2 h 02 min",
    ]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-9, 1e12, math.nan])
def test_a_chart_of_one_point_is_drawn(value):
    drawing = svg(Chart("t", "h", (Series("s", ((4.0, value),), "1"),)))
    assert "nan" not in drawing and "inf" not in drawing
    assert ("<circle" in drawing) == math.isfinite(value)


def test_every_ending_has_a_colour():
    assert set(panels.END_TONES) == {reason.value for reason in EndReason}


def test_signs_say_what_was_looked_at_and_what_could_not_be_judged():
    short = [{"step": step, "reward/mean": 0.0, "eval/pass_at_1": 0.0} for step in range(4)]
    said = coverage(short)
    assert said.startswith("Looked at over 4 rounds: held-out pass@1, steps in reward.")
    assert "Not judged: groups without signal (0 of at least 10 rounds), entropy" in said
    assert said.endswith("No episode was ever rewarded.")
    assert (
        "entropy"
        in coverage([{"step": step, "policy/entropy": 1.0} for step in range(10)]).partition(
            "Not judged"
        )[0]
    )


@pytest.mark.parametrize(
    ("before", "after", "is_shown"), [(0.2, 0.8, True), (0.5, 0.55, False), (0.5, 0.5, False)]
)
def test_a_headline_says_whether_anything_changed(tmp_path, before, after, is_shown):
    def row(step, value):
        ends = {"eval/ci95_low": value - 0.1, "eval/ci95_high": value + 0.1}
        return {"step": step, "eval/pass_at_1": value} | ends

    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(row(0, before))
        writer.write(row(4, after))
    text = Page(write_report(tmp_path).read_text()).text
    half = math.hypot(0.1, 0.1)
    assert f"change: {after - before - half:+.2f} to {after - before + half:+.2f}" in text
    assert ("do not show that anything changed" not in text) is is_shown
