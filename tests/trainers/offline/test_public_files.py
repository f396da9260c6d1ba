"""Stages on public files of preferences, from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preference_cases import tiny_policy

from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import run_stage


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "file", "more"),
    [
        ("sft", "dpo_en_shared.jsonl.gz", {}),
        ("sft", "kto_en_shared.jsonl.gz", {}),
        ("reward", "llmbar_shared.jsonl", {}),
        ("reward", "pandalm_shared.jsonl", {"reward": {"heads": 3, "margin": True}}),
        ("preference", "dpo_en_shared.jsonl.gz", {}),
        ("preference", "kto_en_shared.jsonl.gz", {"objective": "kto"}),
    ],
)
def test_public_files_train_end_to_end(
    kind: str, file: str, more: dict[str, Any], data_dir: Path, tmp_path: Path
) -> None:
    path = data_dir / "preferences" / file
    row = {
        "stage": kind,
        "model": tiny_policy(context=1024),
        "data": {"files": [str(path)], "skip_bad_rows": True},
        "steps": 3,
        "batch_size": 4,
        "micro_rows": 4,
        "card": {"prompts": 2, "max_tokens": 8},
    }
    found = run_stage(StageSettings.model_validate(row | more), tmp_path / "run")
    assert found["data"]["train_rows"] > 20 and found["data"]["held_out_rows"] > 0
    assert found["after"] != found["before"] and Path(found["model"], "config.json").exists()
    if file.startswith("llmbar"):
        assert set(found["after"]["subsets"]) >= {"Natural", "Adversarial/Neighbor"}
