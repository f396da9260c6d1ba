"""Training on what a real vLLM samples."""

from __future__ import annotations

import pytest
from helpers import tiny_model_folder
from run_cases import PARITY, run, settings

from agentrl.engines.base import EngineSettings
from agentrl.engines.factory import open_engine
from agentrl.engines.loading import load_model
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import ConfigError
from agentrl.trainers.observe.parity import ParityError
from agentrl.trainers.run import Run

LORA = {"compute": {"lora_rank": 2, "micro_tokens": 512}}


class Lent:
    """The engine of all tests in the hands of one run, which closes its engine at its end."""

    def __init__(self, engine: VllmEngine, skips: int = -1) -> None:
        self._engine, self._skips, self.loads = engine, skips, []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()

    def load(self, weights, version: int) -> None:
        if version == self._skips:  # as vLLM's own reload does on a CPU, silently
            self._engine.version = version
        else:
            self._engine.load(weights, version)
        self.loads.append(version)

    async def close(self) -> None:
        self.resume()


def lend(vllm, **options):
    lent = Lent(vllm.engine, **options)
    return lent, lambda model, chat, *, synchronous: lent


def of_vllm(**changes):
    row = {"deterministic": False, "eval_every": 0, "learning_rate": 1e-2, **changes}
    return settings(tiny_model_folder(), **row)


@pytest.mark.parametrize("change", [{}, LORA], ids=["plain", "lora"])
def test_every_round_is_sampled_with_the_weights_before_it(vllm, tmp_path, change):
    """Adapters are merged for the engine, which rounds differently."""
    lent, factory = lend(vllm)
    rows = run(of_vllm(**change, steps=10), tmp_path / "x", engine=factory)
    assert lent.loads == list(range(11))
    assert max(row["parity/gap_max"] for row in rows) < 1e-3
    assert all(row["parity/probe_gap"] < 1e-3 for row in rows)
    assert all(row["parity/probe_followed"] > 0.5 for row in rows if "parity/probe_followed" in row)
    assert sum("parity/probe_followed" in row for row in rows) >= 8
    assert max(row["staleness/max"] for row in rows) == 0
    assert all(row["engine/running_max"] > 1 for row in rows)


def test_an_update_that_is_skipped_stops_the_run(vllm, tmp_path):
    lent, factory = lend(vllm, skips=3)
    with pytest.raises(ParityError, match="stale weights"):
        run(of_vllm(steps=10), tmp_path / "x", engine=factory)
    assert lent.loads == [0, 1, 2, 3]


def test_one_process_has_one_vllm(vllm, tmp_path):
    with pytest.raises(ConfigError, match="already has one: close it first"):
        Run(of_vllm(engine={"name": "vllm", "process": False}), tmp_path / "x")


def test_a_tokenizer_of_another_model_is_refused(vllm, model):
    smaller = load_model(model)
    smaller.resize_token_embeddings(8)
    for settings_ in (EngineSettings(), EngineSettings(name="vllm")):
        with pytest.raises(ConfigError, match="and the model a vocabulary of 8: give the token"):
            open_engine(smaller, vllm.chat, settings=settings_)


@pytest.mark.long
def test_a_deterministic_run_with_vllm_is_the_same_again(tmp_path):
    """Each in a process of its own, from the command line; the second is resumed half-way."""
    import json

    from conftest import require
    from helpers import run_cli

    require("vllm")
    file = tmp_path / "run.toml"
    row = [f'env = "{PARITY}"', f'model = "{tiny_model_folder()}"', "steps = 4", "group_size = 4"]
    row += ["tasks_per_step = 4", "learning_rate = 1e-3", "deterministic = true", "save_every = 2"]
    file.write_text("\n".join([*row, 'engine = {name = "vllm", kv_cache_gib = 0.0625}']))
    told = []
    for name, halves in (("a", [[]]), ("b", [["--set", "steps=2"], ["--resume"]])):
        for more in halves:
            done = run_cli("train", file, "--out", tmp_path / name, *more)
            assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        told.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    assert told[0] == told[1]
