"""The seams of a run: other engines, two copies of the weights, rounds in flight."""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch
from naive_engine import NaiveEngine
from run_cases import PARITY, run, settings, timeless

from agentrl.engines.loading import load_model
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.learner import Learner
from agentrl.trainers.loop import train
from agentrl.trainers.models.weights import PolicyWeights, sampling_copy
from agentrl.trainers.observe.parity import ParityError
from agentrl.trainers.rounds import Round
from agentrl.trainers.run import Run

LORA = {"compute": {"lora_rank": 2, "micro_tokens": 512}}


@pytest.mark.bit_equal
@pytest.mark.parametrize("change", [{}, LORA, {"recipe": "ppo"}], ids=["plain", "lora", "ppo"])
def test_a_second_copy_of_the_weights_samples_as_the_trained_one_does(model, tmp_path, change):
    """With adapters the copy has them merged, which rounds differently."""
    shared = run(settings(model, **change), tmp_path / "a" / "x")
    copied = run(settings(model, **change, engine={"own_weights": True}), tmp_path / "b" / "x")
    assert len(copied) == len(shared)
    for a, b in zip(shared, copied, strict=True):
        assert a.keys() == b.keys()
        assert b["step"] == 0 or b["parity/gap_max"] < 1e-4
    if not change:
        assert [row["reward/mean"] for row in shared[1:]] == [
            row["reward/mean"] for row in copied[1:]
        ]


@pytest.mark.parametrize("change", [{}, LORA], ids=["plain", "lora"])
def test_weights_are_those_that_a_folder_of_the_policy_has(model, tmp_path, change):
    with Run(settings(model, **change, steps=1), tmp_path / "x") as opened:
        train(opened)
        given = opened.learner.weights().tensors()
        twin = sampling_copy(opened.learner.model).state_dict()
    saved = load_model(tmp_path / "x/checkpoints/step_1/model").state_dict()
    assert given.keys() == saved.keys() == twin.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(given[name].detach(), tensor)
        torch.testing.assert_close(given[name].detach(), twin[name])


def test_another_engine_stands_behind_the_same_driver(model, tmp_path):
    made = []

    def naive(source, chat, *, synchronous):
        made.append(NaiveEngine(copy.deepcopy(source), chat.stop_ids))
        return made[-1]

    rows = run(settings(model, steps=3, eval_every=0), tmp_path / "x", engine=naive)
    assert made[0].loads == [0, 1, 2, 3] and made[0].closed
    assert all(row["parity/gap_max"] < 1e-4 for row in rows)
    assert max(row["staleness/max"] for row in rows) == 0


def test_an_engine_that_keeps_its_old_weights_is_found_out(model, tmp_path):
    class Deaf(NaiveEngine):
        def load(self, weights, version):
            self.version = version

    def deaf(source, chat, *, synchronous):
        return Deaf(copy.deepcopy(source), chat.stop_ids)

    config = settings(model, steps=3, eval_every=0, learning_rate=1e-2)
    with pytest.raises(ParityError):
        run(config, tmp_path / "x", engine=deaf)


def test_another_task_source_stands_behind_the_same_driver(model, tmp_path):
    class Same:
        """Hands out one set of tasks for ever."""

        def __init__(self):
            self.tasks = list(islice(factory(PARITY)().tasks("train", 0), 4))
            self.seen = 0

        def next(self, n):
            return self.tasks[:n]

        def observe(self, groups):
            self.seen += len(groups)

        def state(self):
            return {"seen": self.seen}

    source = Same()
    run(settings(model, steps=2, eval_every=0), tmp_path / "x", source=source)
    assert source.seen == 8
    assert {key.task for key in read_episodes(tmp_path / "x/episodes.jsonl")} == {
        task.id for task in source.tasks
    }


def test_a_round_that_plays_during_an_update_is_of_the_old_weights(model, tmp_path):
    """What an asynchronous driver does: two rounds in flight, one update under way."""
    config = settings(model, deterministic=False, eval_every=0, engine={"own_weights": True})
    with Run(config, tmp_path / "x") as opened:
        first, second = opened.source.next(4), opened.source.next(4)
        one = opened.rollouts.dispatch(first, 0)
        two = opened.rollouts.dispatch(second, 1)
        learner, groups = opened.learner, one.gather()
        opened.engine.pause()
        played = Round(0, groups, (), (), {task.id: task for task in first})
        learnt = learner.step(opened.pack(played), 0)
        assert learnt["policy/updates"] == 2
        opened.engine.resume()
        late = two.gather()
        assert {s.version for g in late for e in g.episodes for t in e.trajectories
                for s in t.segments if s.version >= 0} == {0}  # fmt: skip
        opened.rollouts.sync(learner.weights(), 1)
        after = learner.step(opened.pack(Round(1, late, (), (), {t.id: t for t in second})), 1)
        assert after["staleness/mean"] == 1.0
    assert {key.step for key in read_episodes(tmp_path / "x/episodes.jsonl")} == {0, 1}


def test_a_learner_learns_from_any_batch_and_knows_no_environment(model, tmp_path):
    """Its settings name an environment that does not exist."""
    with Run(settings(model, steps=1), tmp_path / "x") as opened:
        batch = opened.pack(opened.play(0))
        expected = opened.learner.step(batch, 0)
    alone = Learner.load(settings(model, steps=1, env="no-such-environment-v0"))
    assert alone.step(batch, 0) == expected
    assert isinstance(alone.weights(), PolicyWeights)
    kept = alone.save(tmp_path)
    assert (
        kept == {"coefficients": {}, "version": 1}
        and (tmp_path / "model" / "config.json").is_file()
    )


def test_records_say_round_and_phase_in_fields_of_their_own(model, tmp_path):
    run(settings(model, recipe="remax", steps=2, group_size=2), tmp_path / "x")
    keys = list(read_episodes(tmp_path / "x/episodes.jsonl"))
    assert {key.run for key in keys} == {"x"}
    assert {key.phase for key in keys} == {"train", "greedy", "eval"}
    assert [row["step"] for row in timeless(tmp_path / "x")] == [0, 1, 2]
