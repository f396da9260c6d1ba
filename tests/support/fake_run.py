"""A made-up but plausible run folder: 40 steps of training on one-line bug repair, about a hundred
episodes.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

from agentrl.records.files import EpisodeWriter, MetricsWriter
from agentrl.trajectory import Counts, Episode, EpisodeKey, Segment, Trajectory
from agentrl.types import BadCall, Ending, EndReason, Message, Score, TaskView, ToolCall

CONFIG = """\
env = "bugfix-v0"
model = "runs/sft/model"
seed = 7
steps = 40

[recipe]
name = "grpo"
clip_low = 0.2
clip_high = 0.28
kl = 0.0
std_floor = 1e-4

[rollout]
groups = 24
group_size = 8
temperature = 1.0
concurrency = 64
sandbox = "bubblewrap"

[optimizer]
name = "adamw"
lr = 8e-4
betas = [0.9, 0.95]
grad_clip = 1.0
warmup_steps = 8

[eval]
every = 5
tasks = 96
samples = 1
"""


class Words:
    """A vocabulary of words and signs that grows as it is used; decodes like a tokenizer."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"<\|\w+\|>| ?\w+|\n+|\s|[^\w\s]", text)
        return [self.ids.setdefault(piece, len(self.ids) + 100) for piece in pieces]

    def decode(self, ids, *, skip_special_tokens: bool) -> str:
        texts = {number: piece for piece, number in self.ids.items()}
        return "".join(texts[number] for number in ids)


def write_fake_run(folder: Path, *, steps: int = 40, seed: int = 0) -> Words:
    """Fill `folder` and return the vocabulary that its episodes were written with."""
    chance = random.Random(seed)
    words = Words()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(steps + 1):
            writer.write(metrics_row(step, steps, chance))
    with EpisodeWriter(folder / "episodes.jsonl") as writer:
        for step in range(0, steps + 1, 2):
            for sample in range(5):
                writer.write(fake_episode(step, sample, skill(step, steps), chance, words))
    return words


def skill(step: int, steps: int) -> float:
    return 0.36 + 0.5 * (1 - math.exp(-3 * step / steps))


def metrics_row(step: int, steps: int, chance: random.Random) -> dict[str, float]:
    p = min(0.97, max(0.02, skill(step, steps) + chance.gauss(0, 0.025)))
    late = step / steps
    cut, lost, odd = 0.12 * (1 - late) + 0.01, 0.004 * chance.random(), 0.07 * math.exp(-6 * late)
    row = {
        "step": step,
        "reward/mean": p,
        "reward/std": math.sqrt(p * (1 - p)),
        "pass/train": p,
        "policy/entropy": 0.62 * math.exp(-1.1 * late) + chance.gauss(0, 0.008),
        "policy/kl": 0.004 + abs(chance.gauss(0, 0.001)),
        "policy/ref_kl": 0.09 * late + abs(chance.gauss(0, 0.003)),
        "policy/clip_low": 0.012 + 0.01 * chance.random(),
        "policy/clip_high": 0.021 + 0.012 * chance.random(),
        "policy/grad_norm": 0.5 + 0.25 * chance.random() + (2.1 if step == 23 else 0),
        "policy/ratio_max": 1.6 + chance.expovariate(1.6),
        "parity/gap_mean": 2e-7 + 1e-7 * chance.random(),
        "parity/gap_max": 1e-6 + 8e-7 * chance.random(),
        "length/sampled_mean": 92 - 24 * late + chance.gauss(0, 2),
        "length/turns_mean": 4.6 - 1.1 * late + chance.gauss(0, 0.1),
        "tools/calls_mean": 4.3 - 0.9 * late + chance.gauss(0, 0.1),
        "tools/error_rate": 0.14 * math.exp(-2 * late) + 0.01 * chance.random(),
        "format/bad_calls_rate": 0.08 * math.exp(-4 * late) + 0.004 * chance.random(),
        "groups/all_pass": max(0.0, p**5 + chance.gauss(0, 0.02)),
        "groups/all_fail": max(0.0, (1 - p) ** 4 + chance.gauss(0, 0.015)),
        "episodes/failed_infra": float(lost > 0.003),
        "episodes/truncated": cut,
        "end/submitted": 1 - cut - lost - odd,
        "end/format_error": odd,
        "end/max_turns": cut * 0.7,
        "end/max_tokens": cut * 0.3,
        "end/sandbox_lost": lost,
        "time/rollout_s": 2.4 - 0.5 * late + 0.2 * chance.random(),
        "time/update_s": 1.3 + 0.1 * chance.random(),
        "time/tokens_per_s": 7300 + chance.gauss(0, 300),
    }
    row["groups/no_signal"] = row["groups/all_pass"] + row["groups/all_fail"]
    if step % 5 == 0:
        held = round(96 * min(0.95, skill(step, steps) + chance.gauss(0, 0.015))) / 96
        half = 1.96 * math.sqrt(held * (1 - held) / 96)
        row |= {
            "eval/pass_at_1": held,
            "eval/ci95_low": held - half,
            "eval/ci95_high": held + half,
            "time/eval_s": 1.9,
        }
    return row


def fake_episode(step: int, sample: int, p: float, chance: random.Random, words: Words) -> Episode:
    name, sign, wrong = chance.choice(
        [("scale", "*", "+"), ("gap", "-", "+"), ("total", "+", "-"), ("ratio", "//", "*")]
    )
    code = f"def {name}(a, b):\n    # {name} of two numbers\n    return a {wrong} b\n"
    opening = Message.user(
        "One line of solution.py is wrong. Repair it so that every docstring holds.\nFAIL"
        f" {name}(7, 3)"
    )
    talk = _Talk(words, chance, step)
    talk.open(Message.system("You repair Python files. Call one tool per turn."), opening)
    roll = chance.random()
    if roll < 0.06:
        talk.say(
            "",
            BadCall(
                '{"name": "read_file", "arguments": {', "the call is no JSON: it ends too early"
            ),
        )
        talk.hear("error: bad_call: the call is no JSON: it ends too early")
    talk.say("Let me look at the file.", ToolCall("read_file", {"path": "solution.py"}))
    talk.hear(code)
    if roll < 0.2:
        talk.say("", ToolCall("replace_line", {"line": "3", "text": f"    return a {sign} b"}))
        talk.hear("error: bad_arguments: line: input should be a valid integer")
    solved = chance.random() < p
    talk.say(
        f"Line 3 uses {wrong!r}; the test wants {sign!r}.",
        ToolCall(
            "replace_line", {"line": 3, "text": f"    return a {sign if solved else wrong} b"}
        ),
    )
    talk.hear("ok")
    if chance.random() < 0.5:
        talk.say("", ToolCall("run_tests", {}))
        talk.hear(
            "1 passed"
            if solved
            else f"FAIL {name}(7, 3): expected {eval(f'7 {sign} 3')}, got {eval(f'7 {wrong} 3')}"
        )
    end = EndReason.SUBMITTED
    if chance.random() < 0.04:
        end = EndReason.SANDBOX_LOST
    elif not solved and chance.random() < 0.3:
        end = EndReason.MAX_TURNS
    else:
        talk.say("Done.", ToolCall("submit", {}))
        talk.hear("submitted")
    fixed = code if not solved else code.replace(f"a {wrong} b", f"a {sign} b")
    score = Score(
        float(solved),
        {"tests": float(solved), "lines_changed": 1.0},
        "3 of 3 hidden tests pass" if solved else "1 of 3 hidden tests pass",
    )
    return Episode(
        key=EpisodeKey(
            "seed7",
            step,
            f"bugfix-{name}-{chance.randrange(400):03}",
            sample,
            phase="eval" if sample == 4 else "train",
        ),
        env="bugfix-v0",
        task=TaskView(id=f"bugfix-{name}", instruction=opening.content),
        start="8c1f",
        messages=tuple(talk.messages),
        end=end,
        score=(
            Score.failed("the sandbox stopped answering after 5 s")
            if end.ending is Ending.FAILED
            else score
        ),
        trajectories=talk.branches(fork=chance.random() < 0.08),
        counts=talk.counts(),
        artifacts={} if end.ending is Ending.FAILED else {"solution.py": fixed.encode()},
    )


class _Talk:
    def __init__(self, words: Words, chance: random.Random, version: int) -> None:
        self.words, self.chance, self.version = words, chance, version
        self.messages: list[Message] = []
        self.segments: list[Segment] = []

    def open(self, *messages: Message) -> None:
        self.messages += messages
        text = "".join(f"<|{message.role}|>\n{message.content}<|end|>\n" for message in messages)
        self.segments.append(Segment.prompt(self.words.encode(text + "<|assistant|>\n")))

    def say(self, text: str, call: ToolCall | BadCall) -> None:
        self.messages.append(Message.assistant(text, call))
        body = (
            json.dumps({"name": call.name, "arguments": call.arguments})
            if isinstance(call, ToolCall)
            else call.text
        )
        ids = self.words.encode(f"{text}\n<tool_call>{body}</tool_call><|end|>".lstrip())
        logprobs = [
            (
                -self.chance.expovariate(3.0)
                if self.chance.random() < 0.3
                else -1e-3 * self.chance.random()
            )
            for _ in ids
        ]
        self.segments.append(Segment.sampled(ids, logprobs, self.version, "stop"))

    def hear(self, text: str) -> None:
        call = self.messages[-1].tool_calls[0]
        self.messages.append(Message.tool(text, call))
        self.segments.append(
            Segment.observation(self.words.encode(f"\n<|tool|>\n{text}<|end|>\n<|assistant|>\n"))
        )

    def branches(self, *, fork: bool) -> tuple[Trajectory, ...]:
        main = Trajectory(tuple(self.segments))
        if not fork:
            return (main,)
        text = self.words.encode("Try again.\n<tool_call>{}</tool_call><|end|>")
        again = Segment.sampled(text, [-0.7] * len(text), self.version, "length")
        return main, main.fork(3).extend(again)

    def counts(self) -> Counts:
        turns = [message for message in self.messages if message.role == "assistant"]
        answers = [message for message in self.messages if message.role == "tool"]
        return Counts(
            turns=len(turns),
            tool_calls=len(answers),
            tool_errors=sum(message.content.startswith("error:") for message in answers),
            bad_calls=sum(isinstance(message.tool_calls[0], BadCall) for message in turns),
            sampled_tokens=sum(len(segment.logprobs) for segment in self.segments),
            wall_s=0.4 * len(turns) + self.chance.random(),
        )
