"""What is equal bit for bit here is so under the kernels of other processors, and wherever a loaded
tensor happens to lie.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import REPO

ROOMS = ("tests/trainers/models", "tests/trainers/online")
SETTINGS = {
    # The kernels that PyTorch compiled for a processor without AVX2, and for one without AVX512.
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    # MKL's path for any x86-64 processor, and the one for those without AVX: there it depends on
    # alignment how a row times a matrix is rounded.
    "any processor": {"MKL_CBWR": "COMPATIBLE"},
    "no AVX": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
PROBE = """
import torch
from misaligned import shifted
torch.manual_seed(0)
torch.set_num_threads(1)
x, w = torch.randn(1, 131), torch.randn(77, 131)
print(int(torch.equal(x @ w.T, x @ shifted(w).T)))
"""


ATTENTION = """
import torch
query = torch.randn(16, 4, 256, 32, dtype=torch.bfloat16)  # small ones take another path
torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
"""


def python(setting, *words, **more):
    paths = os.pathsep.join([str(REPO), str(REPO / "tests/support")])
    env = {**os.environ, "PYTHONPATH": paths, **SETTINGS[setting], **more}
    return subprocess.run(
        [sys.executable, *words], cwd=REPO, env=env, capture_output=True, text=True, timeout=500
    )


@functools.cache
def refusal_of_bfloat16(setting):
    """Why torch itself refuses bfloat16 attention under a setting; "" where it does not.

    Processors with AMX or AVX512-BF16 take a path that kernels for lesser processors lack.
    """
    done = python(setting, "-c", ATTENTION)
    return (done.stderr.strip().splitlines() or ["it crashes"])[-1] if done.returncode else ""


def bit_equal_tests(setting, *words, **more):
    chosen = "bit_equal and not bfloat16" if refusal_of_bfloat16(setting) else "bit_equal"
    plugin = ("-p", "misaligned", "-p", "no:cacheprovider", "-m", chosen)
    return python(setting, "-m", "pytest", *plugin, *words, *ROOMS, **more)


@pytest.fixture(scope="module")
def played():
    """All settings, two at a time."""
    with ThreadPoolExecutor(2) as threads:
        return dict(zip(SETTINGS, threads.map(bit_equal_tests, SETTINGS), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_bit_for_bit_wherever_weights_lie(played, setting):
    done = played[setting]
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_bfloat16_is_among_them(setting):
    """The cases with the mark `bfloat16`, which `bit_equal_tests` leaves out otherwise."""
    if refusal := refusal_of_bfloat16(setting):
        pytest.skip(f"torch refuses bfloat16 attention here under {SETTINGS[setting]}: {refusal}")


@pytest.mark.long
def test_without_memory_of_their_own_they_would_not_be():
    probe = python("no AVX", "-c", PROBE)
    if probe.stdout.strip() != "0":
        pytest.skip("this processor rounds alike at all addresses, with all that can be set")
    done = bit_equal_tests("no AVX", "-x", BORROWED="1")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-5000:]
