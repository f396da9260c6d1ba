"""Evaluation runs: what is played, refused, resumed, and counted apart."""

import json

import pytest
from helpers import Echo, loop_threads, make_task, tiny_model_folder, wait_for

from agentrl.errors import ConfigError, TaskError
from agentrl.evaluation.plan import claim, fingerprint_of, read_prices
from agentrl.evaluation.run import EvalPlan, EvalProgress, evaluate
from agentrl.evaluation.summary import summary_lines
from agentrl.records.files import iter_episodes, read_episodes
from agentrl.records.taskfile import write_tasks
from agentrl.registry import factory
from agentrl.types import EndReason, Limits


class Ten(Echo):
    id = "ten-v0"
    count = 10


def test_oracle_and_noop_on_an_environment_without_sandbox():
    told = []
    progress = EvalProgress(lambda total: told.append(total), lambda episode: told.append(episode))
    result = evaluate(EvalPlan(Ten, "oracle", samples=4, ks=(1, 4)), progress)
    assert (
        result["pass_at"] == {"1": 1.0, "4": 1.0}
        and result["n_tasks"] == 10
        and result["n_episodes"] == 40
    )
    assert (
        result["end_reasons"] == {"answered": 40}
        and result["n_failed_infra"] == result["n_refused"] == 0
    )
    assert told[0] == 40 and len(told) == 41
    assert evaluate(EvalPlan(Ten, "noop"))["pass_at"] == {"1": 0.0}
    for name in ("ci95", "mean_reward", "side_effects", "cost", "n_retried", "refused", "mean"):
        assert name in result
    json.dumps(result, allow_nan=False)
    wait_for(lambda: not loop_threads())


@pytest.mark.parametrize("env_id", ["bugfix-v0", "calc-v0", "code-v0"])
@pytest.mark.parametrize("policy", ["oracle", "noop"])
def test_what_ships(env_id, policy, bubblewrap):
    result = evaluate(EvalPlan(factory(env_id), policy, limit=4))
    assert result["pass_at"]["1"] == (1.0 if policy == "oracle" else 0.0) and result["n_tasks"] == 4
    assert result["n_failed_infra"] == 0 and result["refused"] == {}


def test_a_model_is_evaluated():
    brief = type("Brief", (Ten,), {"limits": Limits(turn_tokens=16, wall_s=100)})
    plan = EvalPlan(brief, f"hf:{tiny_model_folder()}", limit=3, samples=2, ks=(1, 2))
    first = evaluate(plan)
    assert (
        first["n_episodes"] == 6
        and first["n_failed_infra"] == 0
        and first["cost"]["sampled_tokens"] > 6
    )
    assert evaluate(plan)["cost"]["sampled_tokens"] == first["cost"]["sampled_tokens"]
    wait_for(lambda: not loop_threads())


def test_refused_tasks_are_not_played_and_say_why(bubblewrap, tmp_path):
    good = {"entry_point": "f", "cases": [{"args": [2], "expected": 4}]}
    double = {"files": {"solution.py": "def f(x):\n    return 2 * x\n"}}
    tasks = [
        make_task("good", hidden=good, oracle=double),
        make_task(
            "wrong-oracle",
            hidden=good,
            oracle={"files": {"solution.py": "def f(x):\n    return x\n"}},
        ),
        make_task("no-oracle", hidden=good, artifacts=["solution.py"]),
        make_task(
            "vacuous",
            hidden={"entry_point": "f", "check": "def check(f):\n    pass\n"},
            oracle=double,
        ),
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    result = evaluate(EvalPlan(factory("code-v0", tasks_file=str(tmp_path / "tasks.jsonl"))))
    assert (
        set(result["refused"]) == {"wrong-oracle", "no-oracle", "vacuous"}
        and result["n_refused"] == 3
    )
    assert (
        result["n_tasks"] == 1 and result["pass_at"]["1"] == 1.0 and all(result["refused"].values())
    )
    write_tasks(tmp_path / "none.jsonl", tasks[1:2])
    with pytest.raises(TaskError, match="no task of code-v0 was admitted"):
        evaluate(EvalPlan(factory("code-v0", tasks_file=str(tmp_path / "none.jsonl"))))


def test_an_interrupted_evaluation_goes_on(tmp_path):
    played: list[str] = []

    class Interrupted(Ten):
        stop_after = 5

        async def setup(self):
            if len(played) >= self.stop_after:
                raise TaskError("interrupted")
            played.append(self.task.id)

    plan = EvalPlan(Interrupted, samples=2, ks=(1, 2), concurrency=1, out=tmp_path)
    with pytest.raises(TaskError, match="interrupted"):
        evaluate(plan)
    before = read_episodes(tmp_path / "episodes.jsonl")
    assert 0 < len(before) <= 5 and not (tmp_path / "eval.json").exists()
    with open(tmp_path / "episodes.jsonl", "ab") as file:
        file.write(b'{"torn')
    played.clear()
    Interrupted.stop_after = 999
    with pytest.warns(UserWarning, match="torn"):
        result = evaluate(plan)
    assert result["n_episodes"] == 20 and result["pass_at"] == {"1": 1.0, "2": 1.0}
    assert len(played) == 20 - len(before) and result["stopped"] == ""
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(result))
    played.clear()
    assert evaluate(plan)["n_episodes"] == 20 and not played


@pytest.mark.parametrize("change", [{"seed": 1}, {"policy": "noop"}, {"split": "train"}])
def test_a_folder_holds_one_evaluation(tmp_path, change):
    plan = {"make": Ten, "policy": "oracle", "out": tmp_path}
    evaluate(EvalPlan(**plan))
    with pytest.raises(ConfigError, match="choose another --out"):
        evaluate(EvalPlan(**{**plan, **change}))


def test_a_smaller_plan_counts_only_what_it_asks_for(tmp_path):
    evaluate(EvalPlan(Ten, samples=3, ks=(3,), out=tmp_path))
    result = evaluate(EvalPlan(Ten, samples=2, ks=(2,), limit=4, out=tmp_path))
    assert result["n_tasks"] == 4 and result["n_episodes"] == 8

    assert result["n_outside_plan"] == 22


class Renamed(Ten):
    limits = Limits(turns=3)


class Reworded(Ten):
    def tasks(self, split, seed):
        for task in super().tasks(split, seed):
            yield task.model_copy(update={"hidden": {"expected": "other"}})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"make": Renamed}, "other limits"),
        ({"make": Reworded}, "another 'test-0' .that task has changed"),
        ({"temperature": 0.5}, r"another temperature .1.0, not 0.5"),
    ],
)
def test_what_the_score_depends_on_cannot_change_between_two_halves(tmp_path, change, match):
    plan = {"make": Ten, "policy": "oracle", "out": tmp_path}
    evaluate(EvalPlan(**plan))
    before = (tmp_path / "plan.json").read_text()
    with pytest.raises(ConfigError, match=match):
        evaluate(EvalPlan(**{**plan, **change}))
    assert (tmp_path / "plan.json").read_text() == before


def test_a_retrained_model_in_the_same_folder_is_another_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_bytes(b"a" * 3_000_000)
    one = fingerprint_of(tmp_path / "model")
    (tmp_path / "model/weights").write_bytes(b"a" * 2_999_999 + b"b")
    assert fingerprint_of(tmp_path / "model") != one
    claim(tmp_path / "out", {"model": one, "tasks": {"a": "1"}})
    claim(tmp_path / "out", {"model": one, "tasks": {"b": "2"}})
    with pytest.raises(ConfigError, match="another model"):
        claim(tmp_path / "out", {"model": "x", "tasks": {}})
    with pytest.raises(ConfigError, match="another 'a'"):
        claim(tmp_path / "out", {"model": one, "tasks": {"a": "2"}})
    (tmp_path / "out/plan.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        claim(tmp_path / "out", {"model": one, "tasks": {}})


def test_tried_again_counts_apart(tmp_path):
    failures = {"test-0": 1, "test-1": 99}

    class Flaky(Ten):
        async def setup(self):
            if failures.get(self.task.id, 0) > 0:
                failures[self.task.id] -= 1
                raise OSError("blip")

    plan = EvalPlan(Flaky, out=tmp_path)
    result = evaluate(plan)
    assert result["n_episodes"] == 10 and result["n_failed_infra"] == 1 and result["n_retried"] == 2
    assert result["pass_at"]["1"] == 1.0 and result["n_excluded"]["1"] == 1
    assert result["end_reasons"] == {"answered": 9, "tool_fault": 1}
    lines = list(summary_lines(result))
    assert lines[0].endswith(" 9 tasks; 1 left out, with fewer than 1 scored samples)")
    assert [
        line
        for line in lines
        if line.startswith("failed, tool_fault, first: test-1: ") and "blip" in line
    ]
    assert result["side_effects"] is None and "side effects not measured" in lines
    found = {"measured": 9, "episodes": 2, "total": 3, "kinds": {"created": 2, "deleted": 1}}
    found |= {"rate": 2 / 9, "ci95": (0.063, 0.547)}
    assert (
        "side effects 3 in 2 of 9 measured episodes (0.222, 95 % interval 0.063 to 0.547):"
        " created 2, deleted 1"
    ) in list(summary_lines(result | {"side_effects": found}))
    assert len(list(iter_episodes(tmp_path / "episodes.jsonl"))) == 12
    failures.clear()
    healed = evaluate(plan)  # the failed one is played again, and only that one
    assert healed["n_failed_infra"] == 0 and healed["n_episodes"] == 10
    again = evaluate(
        plan
    )  # the failed second attempt of the first run does not hide the good one of the second
    assert again["n_failed_infra"] == 0 and again["pass_at"] == healed["pass_at"]
    assert len(list(iter_episodes(tmp_path / "episodes.jsonl"))) == 13
    assert all(
        e.end is not EndReason.TOOL_FAULT or e.key.task < "test-2"
        for e in iter_episodes(tmp_path / "episodes.jsonl")
    )


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"samples": 0}, "--samples 0"),
        ({"samples": 2, "ks": (1, 3)}, "--k 3"),
        ({"ks": ()}, r"--k \(empty\)"),
        ({"limit": -1}, "--limit -1"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"policy": "orakel"}, "use oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL"),
        ({"policy": "hf:"}, "is unknown"),
        ({"policy": "vllm:"}, "is unknown"),
        ({"policy": "vllm:/no/such"}, "does not exist"),
        ({"policy": "hf:/no/such"}, "does not exist"),
        ({"sandbox": "x"}, "sandbox='x'"),
        ({"make": factory("calc-v0")}, "--limit"),
        (
            {"make": type("Empty", (Ten,), {"count": 0})},
            "no tasks in split 'test': name another with --split",
        ),
    ],
)
def test_bad_plans_are_refused(plan, match):
    with pytest.raises(ConfigError, match=match):
        evaluate(EvalPlan(**{"make": Ten, **plan}))


def test_every_task_of_code_v0_is_screened(bubblewrap, tmp_path):
    right = {"files": {"solution.py": "def f(x):\n    return 2 * x\n"}}
    tasks = [
        make_task(
            "good",
            hidden={"entry_point": "f", "cases": [{"args": [2], "expected": 4}]},
            oracle=right,
        ),
        make_task("empty", hidden={}, oracle=right),
        make_task(
            "typo",
            hidden={"entry_point": "f", "case": [{"args": [2], "expected": 4}]},
            oracle=right,
        ),
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    result = evaluate(EvalPlan(factory("code-v0", tasks_file=str(tmp_path / "tasks.jsonl"))))
    assert result["pass_at"]["1"] == 1.0 and set(result["refused"]) == {"empty", "typo"}
    assert (
        "field hidden is empty" in result["refused"]["empty"]
        and "give one of" in result["refused"]["typo"]
    )


class Wordy(Ten):
    """Its policy is a model, so that there are tokens to count."""

    limits = Limits(turn_tokens=8, turns=1, wall_s=100)


def test_a_bound_ends_it_and_a_higher_one_goes_on(tmp_path):
    plan = {
        "make": Wordy,
        "policy": f"hf:{tiny_model_folder()}",
        "concurrency": 1,
        "prices": (1.0, 2.0),
        "out": tmp_path,
    }
    cut = evaluate(EvalPlan(**plan, max_tokens=1))
    assert cut["stopped"] == "max_tokens" and cut["n_episodes"] == 1 and cut["n_missing"] == 9
    paid = cut["cost"]
    exact = (paid["prompt_tokens"] * 1.0 + paid["sampled_tokens"] * 2.0) / 1e6
    assert exact > 0 and paid["usd"] == pytest.approx(exact)
    more = evaluate(EvalPlan(**plan, max_usd=3 * exact))
    assert more["stopped"] == "max_cost" and 2 <= more["n_episodes"] <= 5
    whole = evaluate(EvalPlan(**plan))
    assert whole["stopped"] == "" and whole["n_missing"] == 0 and whole["n_episodes"] == 10
    assert len(list(iter_episodes(tmp_path / "episodes.jsonl"))) == 10
    assert whole["per_success"]["usd"] is None  # nothing was solved
    assert "likelihood" in "".join(whole["chosen"])


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"prices": (-1.0, 2.0)}, "--price -1,2 must be US dollars"),
        ({"max_usd": 1.0}, "--max-cost 1 needs prices"),
        ({"max_usd": 0.0, "prices": (1.0, 1.0)}, "--max-cost 0 must be above zero"),
        ({"max_tokens": 0}, "--max-tokens 0 must be at least 1"),
        ({"concurrency": -1}, "--concurrency -1 must not be negative"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(settings, part):
    with pytest.raises(ConfigError, match=part):
        EvalPlan(Ten, **settings)


def test_prices_of_a_file(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('[m]\nprompt = 1\ncompletion = 2\n["hf:x"]\nprompt = 3\ncompletion = 4\n')
    assert read_prices(str(path), "openai:m@http://localhost:1/v1") == (1.0, 2.0)
    assert read_prices(str(path), "hf:x") == (3.0, 4.0)
    assert read_prices(str(path), "oracle") is None
    assert read_prices("0.5,1") == (0.5, 1.0) and read_prices("") is None
    for text, policy, part in (
        (str(path), "openai:other", "has no prices of 'other'"),
        (str(tmp_path / "none.toml"), "hf:x", "does not exist"),
        ("1", "hf:x", "give two numbers"),
    ):
        with pytest.raises(ConfigError, match=part):
            read_prices(text, policy)


def test_what_was_cut_off_has_its_figures_and_what_infrastructure_failed_is_none_of_them(tmp_path):
    class Lame(Ten):
        async def setup(self):
            if self.task.id == "test-3":
                raise OSError("no start state")

    result = evaluate(EvalPlan(Lame, samples=2, ks=(1, 2), out=tmp_path))
    assert result["n_failed_infra"] == result["n_failed_reset"] == 2
    assert result["n_excluded"] == {"1": 1, "2": 1} and result["pass_at"]["1"] == 1.0
    assert result["per_success"]["turns"] == result["cost"]["turns"] / 18
    assert any("before the first turn" in line for line in summary_lines(result))
