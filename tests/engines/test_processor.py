"""oneDNN is kept off AMX exactly where the processor lists it and a product is illegal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.engines import processor
from agentrl.engines.processor import SETTING, avoid_broken_amx
from agentrl.trainers.models.tiny import build_model, build_tokenizer

ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.mark.parametrize(
    ("listed", "product", "setting"),
    [
        ("amx_bf16", ILLEGAL, "AVX512_CORE_FP16"),
        ("amx_bf16", "pass", "ALL"),
        ("amx_bf16", "raise ImportError", "ALL"),
        ("avx2", ILLEGAL, None),
    ],
)
def test_only_a_product_that_is_illegal_turns_amx_off(
    listed: str,
    product: str,
    setting: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {listed}\n")
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "_PRODUCT", product)
    monkeypatch.delenv(SETTING, raising=False)
    avoid_broken_amx()
    assert os.environ.get(SETTING) == setting
    monkeypatch.delenv(SETTING, raising=False)


def test_the_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "AVX2")
    monkeypatch.setattr(processor, "_PRODUCT", ILLEGAL)
    avoid_broken_amx()
    assert os.environ[SETTING] == "AVX2"


def test_a_product_in_bfloat16_works_after_a_model_was_loaded(tmp_path: Path) -> None:
    """With nothing set, on whatever processor this is."""
    folder = build_model(tmp_path, build_tokenizer(["say 3"] * 8, 280), width=32, layers=1)
    code = (
        f"from agentrl.engines.loading import load_model; load_model({str(folder)!r})\n"
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    )
    env = {name: value for name, value in os.environ.items() if name != SETTING}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "64.0"), done.stderr
