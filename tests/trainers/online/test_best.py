"""The best model is kept: which it is, after kills and resumes as well."""

from __future__ import annotations

import json
import shutil

import pytest
from run_cases import run, settings

from agentrl.errors import ConfigError
from agentrl.records.files import read_metrics
from agentrl.trainers.folder import (
    best_model,
    drop_models_after,
    keep_only_best,
    offer_model,
)


def offer(folder, step, score):
    offer_model(folder, step, {"eval/pass_at_1": score}, lambda draft: (draft / "model").mkdir())


def kept(folder):
    return sorted(path.name for path in (folder / "best").iterdir())


def test_the_best_is_kept_and_says_which_it_is(tmp_path):
    assert best_model(tmp_path) is None
    for step, score in ((0, 0.2), (2, 0.5), (4, 0.5), (6, 0.4)):
        offer(tmp_path, step, score)
    found = best_model(tmp_path)
    assert (found.step, found.pass_at_1) == (2, 0.5) and found.model.is_dir(), "of equals the first"
    assert kept(tmp_path) == ["step_0", "step_2"], "until a checkpoint stands behind both"
    keep_only_best(tmp_path)
    assert kept(tmp_path) == ["step_2"]
    assert json.loads((found.folder / "best.json").read_text())["step"] == 2
    offer_model(tmp_path, 8, {"eval/failed_infra": 6.0}, lambda draft: 1 / 0)
    assert kept(tmp_path) == ["step_2"], "an evaluation that infrastructure failed says nothing"


def test_a_run_that_plays_rounds_again_forgets_what_came_after_its_checkpoint(tmp_path):
    for step, score in ((2, 0.3), (4, 0.6)):
        offer(tmp_path, step, score)
    drop_models_after(tmp_path, 3)
    assert best_model(tmp_path).step == 2
    drop_models_after(tmp_path, 0)
    assert best_model(tmp_path) is None


def test_a_crash_while_it_is_written_leaves_the_one_before(tmp_path):
    offer(tmp_path, 2, 0.3)
    with pytest.raises(ZeroDivisionError):
        offer_model(tmp_path, 4, {"eval/pass_at_1": 0.9}, lambda draft: 1 / 0)
    assert best_model(tmp_path).step == 2
    keep_only_best(tmp_path)
    assert kept(tmp_path) == ["step_2"], "the draft is gone"


def test_a_run_keeps_its_best_model_and_a_resumed_one_the_same(model, tmp_path):
    change = {"keep_best": True, "eval_every": 1, "learning_rate": 1e-2, "save_every": 2}
    run(settings(model, **change, steps=4), tmp_path / "a" / "x")
    rows = read_metrics(tmp_path / "a/x/metrics.jsonl")
    scores = {row["step"]: row["eval/pass_at_1"] for row in rows}
    first = min(step for step, score in scores.items() if score == max(scores.values()))
    found = best_model(tmp_path / "a/x")
    assert (found.step, found.pass_at_1) == (first, scores[first])
    assert (found.model / "config.json").is_file() and (found.model / "tokenizer.json").is_file()
    run(settings(model, **change, steps=3), tmp_path / "b" / "x")
    shutil.rmtree(tmp_path / "b/x/checkpoints/step_3")  # as after a kill in round 4
    run(settings(model, **change, steps=4), tmp_path / "b" / "x", resume=True)
    again = best_model(tmp_path / "b/x")
    assert again[1:] == found[1:]
    weights = [one.model / "model.safetensors" for one in (found, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_it_needs_evaluations(model, tmp_path):
    with pytest.raises(ConfigError, match=r"keep_best=true .* set eval_every as well"):
        run(settings(model, keep_best=True, eval_every=0), tmp_path / "a")
