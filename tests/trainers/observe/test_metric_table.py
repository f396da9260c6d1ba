"""Every metric of a run stands in the table of the docs, and the table names no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from trainer_cases import batch_of, episode, group

from agentrl.evaluation.summary import summarize
from agentrl.trainers.observe import metrics, parity
from agentrl.trainers.observe.metrics import (
    RoundClock,
    RoundDraws,
    gradient_metrics,
    held_out_metrics,
    lost_reward_metrics,
    repeat_metrics,
    rollout_metrics,
    staleness_metrics,
    token_metrics,
)
from agentrl.trajectory import Counts, Group
from agentrl.types import Message, ToolCall

DOCS = Path(__file__).resolve().parents[3] / "docs" / "trainers.md"


def test_every_metric_stands_in_the_table_of_the_docs():
    rows = re.findall(
        r"^\| ((?:`[^`]+/[^`]+`(?:, )?)+) \| ([^|]+) \| .+ \|$", DOCS.read_text(), re.M
    )
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    known = re.compile("|".join(re.sub(r"<\w+>", ".+", name.replace(".", r"\.")) for name in names))
    batch = batch_of(group(1.0, 0.0, 1.0), group(0.0, 0.0, task="u"))
    parts = [parity.trained_tokens(_Said(batch.old_logprobs_BT + 0.1), batch)]
    call = ToolCall("add", {}, "1")
    said = replace(
        episode(messages=(Message.assistant("", call), Message.tool("3", call))),
        counts=Counts(tool_calls=1),
    )
    found = (
        rollout_metrics([Group((said,)), group(1.0, 0.0)])
        | repeat_metrics([group(1.0)], ())
        | RoundDraws([group(0.0)], [], [group(1.0, 0.0)], [], []).metrics()
        | RoundClock().metrics([], 0)
        | held_out_metrics(summarize([episode(), episode(sample=1)], (1, 2)))
        | token_metrics(batch)
        | gradient_metrics([batch])
        | staleness_metrics(batch, 4)
        | lost_reward_metrics(batch, [])
        | parity.gap_metrics(parts)
        | parity.ratio_metrics(parts)
    )
    assert not [name for name in found if not known.fullmatch(name)]
    assert len(found) > 60 and metrics.TURNS == 8


class _Said:
    """As much of a policy output as is read."""

    def __init__(self, logprobs_BT):
        self.logprobs_BT = logprobs_BT
