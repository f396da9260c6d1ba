"""A stage's card: pass@1 of both models on the same tasks, and the interval of the difference."""

from __future__ import annotations

from pathlib import Path

from helpers import tiny_model_folder

from agentrl.chat.settings import ChatSettings
from agentrl.evaluation.compare import compare_runs
from agentrl.trainers.config import Compute
from agentrl.trainers.offline.card import Measurement, card_rows
from agentrl.trainers.offline.settings import Card


def test_the_gain_is_that_of_the_same_tasks(tmp_path: Path) -> None:
    model = str(tiny_model_folder())
    card = Card(prompts=0, env="calc-v0", tasks=4, samples=2, sandbox="process")
    measurement = Measurement(card, model, model, tmp_path, ChatSettings(), Compute(), seed=0)
    found = measurement.measure([])
    pair = compare_runs(tmp_path / "eval/before", tmp_path / "eval/after")
    assert pair["n_tasks"] == 4 and pair["difference"] == 0.0
    assert found["gain"] == {"pass_at_1": 0.0, "ci95": list(pair["ci95"])}
    low, high = found["gain"]["ci95"]
    assert low < 0 < high
    (row, *_) = card_rows(found)
    assert row[0] == "pass_at_1" and row[3] == f"+0.000 (95 % {low:+.3f} to {high:+.3f})"
    assert not [one for one in found["readiness"]["problems"] if "pass@1" in one]
