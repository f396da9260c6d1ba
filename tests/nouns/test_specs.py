"""Specs: plain data that builds the same live parts in another process."""

import asyncio
import itertools
import json
import multiprocessing
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from chat_server import chat_server, completion
from helpers import tiny_model_folder

from agentrl.engines.base import EngineSettings
from agentrl.errors import ConfigError
from agentrl.evaluation.regrade import RegradePlan, regrade
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.policies.options import ServedOptions
from agentrl.records.rows import episode_row
from agentrl.registry import _SHIPPED
from agentrl.rollout.play import Setting, play
from agentrl.rollout.rollouts import close_policy
from agentrl.safety.loading import SHIPPED, read_policy
from agentrl.sandboxes.network import Allow
from agentrl.specs import (
    EnvSpec,
    GuardSpec,
    NetworkSpec,
    PolicySpec,
    PoolSpec,
    RunSpec,
    VerifierSpec,
)
from agentrl.trajectory import EpisodeKey
from agentrl.types import LimitSettings

DATA = {"desk-v0": "tools/tau_retail", "inject-v0": "safety/agentdojo"}
"""Shipped environments whose tasks are public data."""
POLICY = {"calc-v0": "work-area", "code-v0": "work-area"}
"""Safety policies that the shipped environments are played under; the others have none."""


def first_task(spec):
    return next(iter(spec.build().tasks("test", 0)))


async def _play(spec, task):
    setting = Setting.open(spec)
    try:
        episode = await play(setting.of(task), task, EpisodeKey(spec.run, 0, task.id, 0))
    finally:
        await close_policy(setting.policy)
        if setting.pool is not None:
            await setting.pool.close()
    row = episode_row(episode)
    row["counts"].pop("wall_s")
    return json.loads(json.dumps(row))


def play_elsewhere(spec, task):
    """The record of one episode of a run, as this process plays it."""
    return asyncio.run(_play(spec, task))


@pytest.fixture(scope="module")
def elsewhere():
    """Another process, which shares nothing with this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def same_after_json_and_pickle(spec):
    again = type(spec).from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec == pickle.loads(pickle.dumps(spec))
    return again


def prompts(folder: Path) -> dict[str, str]:
    """Settings of chat-v0, which has no tasks of its own."""
    rows = [{"prompt": f"Say {number}."} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text("def length(prompt, answer):\n    return float(len(answer))\n")
    return {"prompts": str(folder / "prompts.jsonl"), "reward": f"{folder / 'mine.py'}:length"}


@pytest.mark.parametrize("policy", ["oracle", "noop"])
@pytest.mark.parametrize("env", sorted(_SHIPPED))
def test_every_shipped_environment_gives_the_same_record_elsewhere(
    env, policy, elsewhere, tmp_path, request
):
    settings = prompts(tmp_path) if env == "chat-v0" else {}
    if env in DATA:
        settings = {"data": str(request.getfixturevalue("data_dir") / DATA[env])}
    spec = EnvSpec.of(env, settings, limits=LimitSettings(wall_s=200.0))
    built = spec.build()
    run = RunSpec(
        envs=(spec,),
        policy=PolicySpec(name=policy),
        pool=PoolSpec.of(built, size=1) if built.needs_sandbox else None,
        guard=GuardSpec.of(read_policy(POLICY[env]), deterministic=True) if env in POLICY else None,
        seed=3,
    )
    run, task = same_after_json_and_pickle(run), first_task(spec)
    here = play_elsewhere(run, task)
    assert here == elsewhere.apply(play_elsewhere, (run, task))
    assert here["score"]["value"] is not None and here["seed"] == 3
    if policy == "oracle" and env != "chat-v0":
        assert here["score"]["value"] == 1.0


@pytest.mark.parametrize("policy", ["hf", "openai"])
def test_a_policy_with_a_model_says_the_same_elsewhere(policy, elsewhere):
    env = EnvSpec.of("calc-v0", limits=LimitSettings(turns=2, turn_tokens=8))
    with chat_server(completion("4")) as server:
        names = {"hf": f"hf:{tiny_model_folder()}", "openai": f"openai:m@{server.url}"}
        spec = PolicySpec(name=names[policy], temperature=0.7, served=ServedOptions(retries=0))
        run = same_after_json_and_pickle(RunSpec(envs=(env,), policy=spec))
        here = play_elsewhere(run, first_task(env))
        assert here == elsewhere.apply(play_elsewhere, (run, first_task(env)))
    assert len(here["messages"]) > 1


ALL = {
    "env": EnvSpec.of("calc-v0", {"operations": 3}, limits=LimitSettings(turns=2), prefix="calc"),
    "priced": EnvSpec.of("calc-v0", verifier=VerifierSpec(side_effect_price=0.5)),
    "vllm": PolicySpec(name="vllm:m", top_k=4, engine=EngineSettings(name="vllm")),
    "served": PolicySpec(name="openai:m", prices=(0.1, 2.0), served=ServedOptions(top_p=0.5)),
    "network": NetworkSpec.of(Allow("a.example", private=["b.example:81"], size_mb=3)),
    "pool": PoolSpec(sandbox="docker", size=3, network=NetworkSpec(hosts=("a.example",))),
    **{name: GuardSpec.of(read_policy(name)) for name in SHIPPED},
}


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_specs_survive_json_and_pickle(spec):
    same_after_json_and_pickle(spec)


def test_what_was_built_stays_in_its_process():
    guard = ALL["work-area"]
    guard.build()
    assert "approver" in vars(guard) and "approver" not in vars(pickle.loads(pickle.dumps(guard)))


def test_a_network_is_rebuilt_as_it_was():
    allow = ALL["network"].build()
    assert (allow.hosts, allow.private, allow.size_mb) == (("a.example",), ("b.example:81",), 3)


def test_a_pool_refuses_untrusted_code_where_there_is_no_boundary():
    with pytest.raises(ConfigError, match="boundary"):
        PoolSpec(sandbox="process", untrusted=True).build()


def test_no_spec_holds_a_key(monkeypatch):
    monkeypatch.setenv("MY_MODEL_KEY", "sk-1234567890abcdef")
    spec = PolicySpec(name="openai:m@http://localhost:1/v1", key_variable="MY_MODEL_KEY")
    policy = spec.build(EnvSpec.of("calc-v0").build())
    assert policy.api_key == "sk-1234567890abcdef"
    assert "sk-1234567890abcdef" not in json.dumps(spec.to_json()) + repr(pickle.dumps(spec))


# Files of users

ENV = """
from agentrl import ToolEnv, Task, Score, tool
import words

async def verify(submission):
    return Score(float(words.RIGHT in submission.answer))

class Own(ToolEnv):
    id = "own-v0"
    verifier = verify

    def tasks(self, split, seed):
        yield Task(id="a", instruction="Say it.", oracle={"answer": words.RIGHT})

    @tool
    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        return words.RIGHT
"""


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "env.py").write_text(ENV)
    (folder / "words.py").write_text("RIGHT = 'yes'\n")
    return folder


def test_an_environment_file_imports_its_neighbours_and_is_rebuilt_from_the_copy(own, elsewhere):
    spec = EnvSpec.of(f"{own / 'env.py'}:Own")
    (file,) = spec.files.values()
    assert list(file.texts) == ["env.py", "words.py"]
    run = same_after_json_and_pickle(RunSpec(envs=(spec,), policy=PolicySpec()))
    task = first_task(spec)
    here = play_elsewhere(run, task)
    assert here["score"]["value"] == 1.0
    shutil.rmtree(own)  # as on another machine
    assert here == elsewhere.apply(play_elsewhere, (run, task))


@pytest.mark.parametrize("changed", ["env.py", "words.py"])
def test_a_changed_file_is_refused(own, changed):
    spec = pickle.loads(pickle.dumps(EnvSpec.of(f"{own / 'env.py'}:Own")))
    (own / changed).write_text((own / changed).read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="has changed") as error:
        spec.build()
    assert error.value.setting == "env"


def test_a_damaged_copy_is_refused(own):
    name = f"{own / 'env.py'}:Own"
    spec = EnvSpec.of(name)
    texts = spec.files[name].texts | {"words.py": "RIGHT = 'no'\n"}
    file = spec.files[name].model_copy(update={"texts": texts})
    shutil.rmtree(own)
    with pytest.raises(ConfigError, match="does not match its hash"):
        spec.model_copy(update={"files": {name: file}}).build()
    with pytest.raises(ConfigError, match="--env recorded"):
        spec.refuse_copies()


def test_neighbours_of_two_folders_are_not_mixed_up(own, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(own, other)
    (other / "words.py").write_text("RIGHT = 'no'\n")
    built = [EnvSpec.of(f"{folder / 'env.py'}:Own") for folder in (own, other, own)]
    assert [first_task(spec).oracle["answer"] for spec in built] == ["yes", "no", "yes"]


# Runs


def test_a_run_folder_keeps_its_specs(tmp_path):
    run = RunSpec(envs=(ALL["env"], EnvSpec.of("math-v0", prefix="math")), policy=PolicySpec())
    assert RunSpec.read(tmp_path) is None
    run.write(tmp_path)
    assert RunSpec.read(tmp_path) == run
    assert run.env_of("math/1").id == "math-v0" and run.env_of("calc/x").id == "calc-v0"
    with pytest.raises(ConfigError, match="belongs to no environment"):
        run.env_of("desk/1")
    (tmp_path / "specs.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        RunSpec.read(tmp_path)


def test_several_environments_play_their_own_tasks():
    run = RunSpec(
        envs=(ALL["env"], EnvSpec.of("math-v0", prefix="math")), policy=PolicySpec(name="noop")
    )
    setting = Setting.open(run)
    task = first_task(run.envs[1])
    assert setting.of(replace_id(task, f"math/{task.id}")).build_env().id == "math-v0"
    assert setting.of(replace_id(task, "calc/1")).build_env().limits.turns == 2


def replace_id(task, name):
    return task.model_copy(update={"id": name})


def test_a_side_effect_costs_what_the_setting_says(data_dir):
    desk = EnvSpec.of("desk-v0", {"data": str(data_dir / DATA["desk-v0"])})
    setting = replace(
        Setting.open(RunSpec(envs=(desk,), policy=PolicySpec(name="noop"))),
        side_effect_price=0.5,
    )
    task = next(itertools.islice(setting.env().tasks("test", 0), 1))
    episode = asyncio.run(play(setting, task, EpisodeKey("r", 0, task.id, 0)))
    assert episode.score.parts["shaping/side_effects"] == 0.0


@pytest.mark.parametrize(
    ("row", "field"),
    [({"id": ""}, "id"), ({}, "id"), ({"id": "x", "ids": 1}, "ids"), ({"id": 3}, "id")],
)
def test_a_wrong_field_is_named(row, field):
    with pytest.raises(ConfigError) as error:
        EnvSpec.from_json(row)
    assert error.value.setting == field


def test_a_setting_that_is_no_json_is_refused():
    spec = EnvSpec(id="calc-v0", settings={"operations": object()})
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        spec.to_json()


def test_an_evaluation_records_its_specs_and_is_graded_again_without_env(own, tmp_path):
    name, out = f"{own / 'env.py'}:Own", tmp_path / "out"
    evaluate(EvalPlan(EnvSpec.of(name), "oracle", out=out))
    spec = RunSpec.read(out)
    assert spec.env.id == name and spec.policy.name == "oracle"
    assert regrade(RegradePlan(out))["n_regraded"] == 1
    shutil.rmtree(own)
    with pytest.raises(ConfigError, match="--env recorded"):
        regrade(RegradePlan(out))
    assert regrade(RegradePlan(out, env="recorded"))["n_changed"] == 0
