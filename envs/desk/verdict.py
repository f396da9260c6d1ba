"""The verdict of desk-v0: the database as after the reference, and what had to be said."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from agentrl.envs.desk.shop import CHANGES, FINDS, Shop
from agentrl.envs.replay import answered_calls
from agentrl.types import Score, ToolCall
from agentrl.verifiers.base import Submission


def judge_service(submission: Submission, new_shop: Callable[[], Shop]) -> Score:
    """1.0 for the right final state with everything said that had to be; else 0.0.

    The state is reached anew: the calls of the episode are made once more in a fresh shop, so that
    the verdict rests on the messages alone. A text was said if a turn of the agent holds it, case
    and commas left out, as in tau2. Where nothing is to be changed and nothing to be said,
    the customer must have been identified; otherwise doing nothing would pass.

    `parts`: "state", "said" (a share) and, where it counts, "identified".
    """
    hidden, shop = submission.task.hidden, new_shop()
    found = set()
    for call, answer in answered_calls(submission.messages):
        if call.name in FINDS:
            found.add(answer)
        elif call.name in CHANGES:
            shop = _repeated(shop, call, answer)
    heard = "\n".join(
        message.content.lower().replace(",", "")
        for message in submission.messages
        if message.role == "assistant"
    )
    said = [text.lower().replace(",", "") in heard for text in hidden["said"]]
    parts = {
        "state": float(shop.fingerprint() == hidden["state"]),
        "said": sum(said) / len(said) if said else 1.0,
    }
    if customer := hidden["identified"]:
        parts["identified"] = float(any(customer in answer for answer in found))
    return Score(float(all(part == 1.0 for part in parts.values())), parts)


def _repeated(shop: Shop, call: ToolCall, answer: str) -> Shop:
    """The shop after a call that was really made: its answer holds the row that it changed.

    That of a call that a guard answered in the tool's place does not.
    """
    trial = shop.fork()
    with suppress(ValueError):
        row = trial.change(call.name, call.arguments)
        if json.dumps(row, ensure_ascii=False) in answer:
            return trial
    return shop
