"""A model by its folder or by its name on the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import tiny_model_folder

from agentrl.engines.loading import dropouts, find_model, load_config, load_model, load_tokenizer
from agentrl.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_model(cache: Path, files: tuple[str, ...] = ()) -> Path:
    """A cache as huggingface_hub lays it out, with the tiny model as `org/tiny`."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "v1").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for index, file in enumerate(sorted(Path(tiny_model_folder()).iterdir())):
        if not files or file.name in files:
            blob = repo / "blobs" / f"blob{index}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that refuses connections."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def test_dropout_is_what_is_asked_for_whatever_the_folder_says(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig

    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert dropouts(load_config(tmp_path)) == [0.1] * 4
    for share in (0.0, 0.3):
        model = load_model(tmp_path, dropout=share).train()
        parts = [part.p for part in model.modules() if type(part).__name__ == "Dropout"]
        assert parts and set(parts) == {share} == set(dropouts(model.config))
    assert load_model(tmp_path).transformer.h[0].attn.attn_dropout.p == 0
    MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"dropout=0.3: a mamba model has none: set it to 0"):
        load_model(tmp_path, dropout=0.3)


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@v1", f"org/tiny@{COMMIT}"])
def test_a_cached_model_is_found_without_a_network(hub: Path, name: str) -> None:
    snapshot = cached_model(hub)
    assert find_model(name) == snapshot
    assert load_tokenizer(name).chat_template
    assert load_model(name).config.model_type == "qwen3"


def test_a_tokenizer_alone_in_the_cache_is_enough_for_what_needs_no_weights(hub: Path) -> None:
    cached_model(hub, ("tokenizer.json", "tokenizer_config.json", "config.json"))
    assert len(load_tokenizer("org/tiny")) > 100
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        load_model("org/tiny")


@pytest.mark.parametrize("name", ["org/other", "org/tiny@v2"])
def test_what_is_not_cached_is_refused_at_once_by_one_sentence(hub: Path, name: str) -> None:
    cached_model(hub)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"cannot be downloaded .*run `hf download org/\w+") as no:
        find_model(name)
    assert time.monotonic() - start < 10
    assert "\n" not in str(no.value)
    if "@" in name:
        assert "--revision v2" in str(no.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "nothing", "./runs/x"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(hub: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: give the path of .* a name on the hub"):
        find_model(name)


def test_a_program_that_is_offline_says_so_within_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "check", "hf:org/none"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "model 'org/none'" in done.stderr
    assert "offline mode is enabled" in done.stderr


def test_code_that_a_folder_brings_along_is_never_run_nor_asked_about(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder(), tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    for name, classes in {
        "config.json": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }.items():
        row = json.loads((folder / name).read_text())
        row |= {"auto_map": classes, "model_type": "evil", "tokenizer_class": "Evil"}
        (folder / name).write_text(json.dumps(row))
    for load in (load_config, load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=r"trust_remote_code|custom code"):
            load(folder)
    assert not (tmp_path / "ran").exists()
