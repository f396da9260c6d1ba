"""Versions of a reward model in a folder: published, compared, withdrawn, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil

import pytest
from helpers import tiny_model_folder
from reward_cases import ranked_pairs

from agentrl.errors import ConfigError
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.reward_service import RewardStore


def test_a_version_knows_how_it_ranks_the_pairs_of_its_store(store, models):
    first, model = store.served(), RewardModel.load(models[0])
    scores = [asyncio.run(model.score(one)) for pair in ranked_pairs()[:3] for one in pair]
    assert first.scores[:6] == pytest.approx(scores, abs=1e-5)
    second = store.publish(models[1], anyway=True)
    ranks = [
        [a > b for a, b in zip(one.scores[::2], one.scores[1::2], strict=True)]
        for one in (first, second)
    ]
    assert second.accuracy == sum(ranks[1]) / 60
    assert second.agrees(first) == sum(a == b for a, b in zip(*ranks, strict=True)) / 60 < 1
    assert [one.number for one in store.versions()] == [1, 2] and store.served() == second
    assert (store.folder / "versions" / "2").stat().st_mode & 0o777 == 0o755


def test_what_cannot_be_published_leaves_the_store_as_it_was(store, models, tmp_path):
    with pytest.raises(ConfigError, match="are those of version 1, which is there already"):
        store.publish(models[0])
    with pytest.raises(ConfigError, match="leave --pairs out, or begin another store"):
        store.publish(models[1], ranked_pairs())
    with pytest.raises(ConfigError, match="has no version yet: give --pairs FILE"):
        RewardStore(tmp_path / "new").publish(models[0])
    with pytest.raises(ConfigError, match=f"model folder {tiny_model_folder()} is no reward model"):
        store.publish(str(tiny_model_folder()))
    with pytest.raises(ConfigError, match="is an address: give the folder"):
        RewardStore("http://127.0.0.1:8100")
    assert store.numbers() == [1] and not list(store.folder.glob("versions/.draft-*"))
    assert not (tmp_path / "new").exists()


def test_what_ranks_clearly_worse_is_served_only_if_that_is_meant(store, models):
    served = store.served()
    worse = [ranked_pairs()[at] for at, margin in enumerate(served.margins) if margin > 0]
    other = RewardStore(store.folder.with_name("other"))
    other.publish(models[0], worse)
    assert other.served().accuracy == 1.0
    with pytest.raises(ConfigError, match=r"ranks 0\.\d+ of \d+ pairs rightly, and version 1"):
        other.publish(models[1])
    assert other.publish(models[1], anyway=True).number == 2


def test_what_a_killed_publisher_left_is_no_version_and_goes_after_a_day(store, models):
    old, new = (store.folder / "versions" / f".draft-{name}" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    assert store.numbers() == [1]
    assert store.publish(models[1], anyway=True).number == 2
    assert not old.exists() and new.exists()


def test_a_store_without_its_first_version_begins_anew(models, tmp_path):
    store = RewardStore(tmp_path / "rewards")
    store.folder.mkdir()
    (store.folder / "pairs.jsonl").write_text("{}\n")  # its publisher was killed then
    assert store.publish(models[0], ranked_pairs()).number == 1 and len(store.pairs()) == 60


def test_only_the_files_of_a_model_are_copied(store, models, tmp_path):
    folder = shutil.copytree(models[1], tmp_path / "inside")
    inside = RewardStore(folder / "rewards")
    inside.publish(str(folder), ranked_pairs())
    assert not list((inside.folder / "versions/1/model").glob("*/"))
    assert inside.load(1)


def test_rollback_serves_the_older_one_and_leaves_the_last_one(store, models):
    with pytest.raises(ConfigError, match="version 1 is the only one"):
        store.rollback("bad")
    store.publish(models[1], anyway=True)
    bad, served = store.rollback("it likes long answers")
    assert (bad.number, served.number) == (2, 1) and store.numbers() == [1]
    assert store.withdrawn(2) == "it likes long answers"
    with pytest.raises(ConfigError, match="version 2, which was withdrawn"):
        store.publish(models[1])
    assert store.publish(models[1], anyway=True).number == 3
    bad, served = store.rollback("an older one", 1)
    assert (bad.number, served.number) == (1, 3)
    with pytest.raises(ConfigError, match=r"version 1 of .* was withdrawn before"):
        store.rollback("again", 1)


def test_a_version_that_is_not_what_was_published_is_not_served(store):
    place = store.folder / "versions" / "1"
    (place / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="its files have changed"):
        store.load(1)


def test_a_version_that_scores_otherwise_here_is_not_served(store):
    path = store.folder / "versions" / "1" / "version.json"
    row = json.loads(path.read_text())
    row["scores"][7] += 1.0
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="scores its own pairs otherwise here"):
        store.load(1)


def test_it_is_published_where_a_loop_is_running_as_in_a_notebook(store, models):
    async def cell():
        return store.publish(models[1], anyway=True).number

    assert asyncio.run(cell()) == 2
