"""Runs in other formats, read back by those who own the format."""

import json

import pytest
from helpers import Echo

from agentrl.errors import ConfigError
from agentrl.evaluation.export import export
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.registry import factory


@pytest.fixture
def run(tmp_path):
    evaluate(EvalPlan(factory("calc-v0"), limit=3, samples=2, ks=(2,), out=tmp_path / "run"))
    return tmp_path / "run"


def test_json_lines_hold_the_conversation(run, tmp_path):
    assert export(run, "jsonl", tmp_path / "rows.jsonl") == 6
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["passed"] for row in rows} == {True} and {row["sample"] for row in rows} == {0, 1}
    assert [message["role"] for message in rows[0]["messages"]][:2] == ["system", "user"]


def test_parquet_has_one_row_per_episode(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(run, "parquet", tmp_path / "rows.parquet") == 6
    table = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(table) == 6 and table[0]["reward"] == 1.0 and table[0]["usd"] is None
    assert json.loads(table[0]["messages"])[-1]["role"] == "assistant"


class Broken(Echo):
    id = "broken-v0"
    count = 2

    def prompt(self):
        if self.task.id.endswith("1"):
            raise OSError("no prompt today")
        return super().prompt()


@pytest.mark.parametrize("name", ["log.eval", "log.json"])
def test_inspect_reads_its_own_format(run, tmp_path, name):
    log = pytest.importorskip("inspect_ai.log")
    assert export(run, "inspect", tmp_path / name) == 6
    found = log.read_eval_log(tmp_path / name)
    assert found.status == "success" and found.eval.task == "calc-v0"
    assert found.eval.config.epochs == 2 and len(found.samples) == 6
    assert found.results.scores[0].metrics["pass@2"].value == 1.0
    sample = found.samples[0]
    assert sample.scores["passed"].value == 1 and sample.messages[2].tool_calls[0].function
    assert sample.messages[3].role == "tool"
    assert sample.messages[3].tool_call_id == sample.messages[2].tool_calls[0].id


def test_inspect_sees_what_infrastructure_failed(tmp_path):
    log = pytest.importorskip("inspect_ai.log")
    evaluate(EvalPlan(Broken, "noop", out=tmp_path / "run"))
    export(tmp_path / "run", "inspect", tmp_path / "log.eval")
    samples = log.read_eval_log(tmp_path / "log.eval").samples
    failed = [sample for sample in samples if sample.error]
    assert len(samples) == 2 and len(failed) == 1 and failed[0].scores is None
    assert "no prompt today" in failed[0].error.message


def test_bad_requests_are_one_sentence(run, tmp_path):
    for arguments, part in (
        ((run, "xml", tmp_path / "x"), "format 'xml' is unknown: use jsonl, parquet, inspect"),
        ((tmp_path, "jsonl", tmp_path / "x"), "holds no episodes"),
        ((run, "jsonl", run / "plan.json"), "exists: choose another file"),
    ):
        with pytest.raises(ConfigError, match=part):
            export(*arguments)
    assert not list(tmp_path.glob(".*part*"))
