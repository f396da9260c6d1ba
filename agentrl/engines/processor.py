"""Processors on which bfloat16 products end the process, and how to avoid that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SETTING = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's environment variable: the newest instructions that it may use."""
_WITHOUT_AMX = "AVX512_CORE_FP16"
_EVERYTHING = "ALL"
_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_CPUINFO = Path("/proc/cpuinfo")


def avoid_broken_amx() -> None:
    """Keep oneDNN off AMX if the processor lists it but using it is an illegal instruction.

    Some virtual machines do that, and torch then ends with SIGILL at the first bfloat16 product,
    which Muon makes even in a float32 run. A child process tries one product, once: the answer is
    kept in the environment, so commands and workers started from here do not ask again. A setting
    of the user's own is left alone. Must run before torch multiplies anything in this process.
    """
    if SETTING in os.environ or not _lists_amx():
        return
    outcome = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True)
    broken = outcome.returncode == -signal.SIGILL
    os.environ[SETTING] = _WITHOUT_AMX if broken else _EVERYTHING


def _lists_amx() -> bool:
    return _CPUINFO.exists() and "amx_bf16" in _CPUINFO.read_text()
