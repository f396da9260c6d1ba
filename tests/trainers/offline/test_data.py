"""Public formats, bad rows, repetitions, splits, and pairs mined from episodes."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_branch, make_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from preference_cases import planted_pairs, tiny_policy, write_rows

from agentrl.chat.tokens import Chat
from agentrl.engines.factory import open_chat
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import EpisodeWriter
from agentrl.trainers.offline.examples import Conversation, Label, Pair, TieError, read_row
from agentrl.trainers.offline.files import read_examples, split_by_prompt
from agentrl.trainers.offline.preference import PreferenceStage
from agentrl.trainers.offline.rows import (
    PairRow,
    encode_conversation,
    encode_examples,
    encode_response,
)
from agentrl.trainers.offline.settings import StageSettings
from agentrl.types import Message

ASKED, YES, NO = Message.user("Hi?"), "Yes.", "No."


def pair_row(chat: Chat, pair: Pair) -> PairRow:
    row = {"stage": "preference", "model": "-", "data": {"files": ["-"]}}
    (made,) = PreferenceStage(StageSettings.model_validate(row)).encode(chat, pair)
    assert isinstance(made, PairRow)
    return made


def one_of(row: dict[str, Any]) -> Any:
    (found,) = read_row(row)
    return found


PAIR_FORMS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Hi?", "chosen": YES, "rejected": NO},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": YES},
        "rejected": {"from": "gpt", "value": NO},
    },
    "messages": {
        "chosen": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": YES}],
        "rejected": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": NO}],
    },
    "ultrafeedback": {
        "prompt": "Hi?",
        "chosen": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": YES}],
        "rejected": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": NO}],
    },
    "hh": {
        "chosen": f"\n\nHuman: Hi?\n\nAssistant: {YES}",
        "rejected": f"\n\nHuman: Hi?\n\nAssistant: {NO}",
    },
    "choice": {"input": "Hi?", "output_1": NO, "output_2": YES, "label": 2},
    "votes": {
        "instruction": "Hi?", "input": "", "response1": YES, "response2": NO,
        "annotator1": 1, "annotator2": 1, "annotator3": 2,
    },
    "ratings": {
        "instruction": "Hi?",
        "completions": [
            {"response": "Hm.", "overall_score": 3},
            {"response": YES, "overall_score": 8},
            {"response": NO, "overall_score": 1},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", PAIR_FORMS)
def test_every_form_of_a_pair_is_the_same_pair(form: str) -> None:
    pair = one_of(PAIR_FORMS[form])
    assert isinstance(pair, Pair) and pair.prompt == (ASKED,)
    assert pair.chosen.messages == (Message.assistant(YES),)
    assert pair.rejected.messages == (Message.assistant(NO),)
    assert pair.margin == {"votes": 1 / 3, "ratings": 7.0}.get(form)


def test_hh_pairs_share_what_they_begin_with() -> None:
    said = "\n\nHuman: A\n\nAssistant: B\n\nHuman: C\n\nAssistant: "
    pair = one_of({"chosen": said + "D", "rejected": said + "E"})
    assert [message.content for message in pair.prompt] == ["A", "B", "C"]


def test_labels_and_conversations() -> None:
    label = one_of({"prompt": "Hi?", "completion": YES, "label": False})
    assert isinstance(label, Label) and not label.desirable and label.prompt == (ASKED,)
    whole = one_of({"instruction": "Hi?", "output": YES, "system": "Be brief."})
    assert isinstance(whole, Conversation)
    assert [message.role for message in whole.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Hi?", "chosen": YES, "rejected": YES}, "chosen equals rejected"),
        ({"prompt": "Hi?", "chosen": " ", "rejected": NO}, "chosen is empty"),
        ({"prompt": "Hi?", "chosen": YES, "rejected": 3}, "a message must be an object, not int"),
        ({"chosen": "A", "rejected": "B"}, "the prompt does not end with a message"),
        ({"messages": [{"role": "robot", "content": "A"}]}, "role 'robot' is not one of"),
        ({"text": "A"}, "no known form of data has the keys text"),
        ({"prompt": "Hi?", "responses": [{"text": "A"}]}, "a response has no number"),
        (PAIR_FORMS["text"] | {"margin": math.nan}, "margin=nan must be a finite number"),
        (PAIR_FORMS["text"] | {"margin": "big"}, "margin='big' must be a finite number"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(read_row(row))


def test_ties_prefer_nothing() -> None:
    with pytest.raises(TieError):
        list(read_row({"input": "Hi?", "output_1": YES, "output_2": NO, "label": 0}))


def test_bad_rows_are_counted_with_their_lines(tmp_path: Path) -> None:
    good = planted_pairs()[:3]
    same = {"prompt": "A", "chosen": "B", "rejected": "B"}
    path = tmp_path / "pairs.jsonl"
    write_rows(path, [same, *good, same, same, same, good[0]])
    path.write_text(path.read_text() + "{torn\n")
    with pytest.raises(UserError) as error:
        read_examples([path], "pairs")
    assert "chosen equals rejected: the pair teaches nothing (4 rows: lines 1, 5, 6, …)" in str(
        error
    )
    assert "not JSON (1 row: line 9)" in str(error) and "data.skip_bad_rows=true" in str(error)
    found, counts = read_examples([path], "pairs", skip_bad_rows=True)
    assert len(found) == 3 and counts.repeated == 1 and counts.rows == 8
    assert "4 rows" in counts.skipped[0]


def test_packed_files_hold_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = planted_pairs()[:4]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(Path(plain).read_text())
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    wanted, _ = read_examples([plain], "pairs")
    for name in ("a.jsonl.gz", "a.json", "a.parquet", "saved"):
        assert read_examples([tmp_path / name], "pairs")[0] == wanted


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        read_examples([tmp_path / "nowhere.jsonl"], "pairs")
    path = write_rows(tmp_path / "sft.jsonl", [{"prompt": "A", "response": "B"}])
    with pytest.raises(UserError, match=r"no pairs in .*1 examples of another kind"):
        read_examples([path], "pairs")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{torn"),
        ("a.json", b"3"),
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl.gz", b"no gzip"),
        ("a.parquet", b"no table"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} cannot be read as "):
        read_examples([tmp_path / name], "pairs")


def test_labels_of_one_kind_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "B", "label": True} for n in range(3)]
    with pytest.raises(UserError, match=r"all 3 labels of .* are true: KTO compares"):
        read_examples([write_rows(tmp_path / "kto.jsonl", rows)], "labels")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=40), st.floats(0, 0.9), st.integers(0, 9))
def test_no_prompt_is_on_both_sides(numbers: list[int], share: float, seed: int) -> None:
    examples = [
        Conversation((Message.user(str(n)), Message.assistant(str(at))))
        for at, n in enumerate(numbers)
    ]
    train, held_out = split_by_prompt(examples, share, seed)
    assert not {one.prompt for one in train} & {one.prompt for one in held_out}
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, examples))
    assert train and bool(held_out) == (share > 0 and len(set(numbers)) > 1)


@pytest.fixture
def chat() -> Chat:
    return open_chat(tiny_policy())


def test_only_the_response_trains(chat: Chat) -> None:
    talk = [
        {"role": "user", "content": "A"}, {"role": "assistant", "content": "Bob"},
        {"role": "user", "content": "C"},
    ]  # fmt: skip
    row = pair_row(chat, one_of({"prompt": talk, "chosen": "Dan", "rejected": "Eve"})).chosen
    trained = [token for token, own in zip(row.ids, row.mask, strict=True) if own]
    assert chat.tokenizer.decode(trained) == "Dan<|im_end|>"
    (whole,) = encode_conversation(
        chat, one_of({"messages": [*talk, {"role": "assistant", "content": "Dan"}]})
    )
    trained = [token for token, own in zip(whole.ids, whole.mask, strict=True) if own]
    assert chat.tokenizer.decode(trained) == "Bob<|im_end|>Dan<|im_end|>"
    assert whole.ids == row.ids


def test_a_row_begins_as_the_template_does_and_not_twice(tmp_path: Path) -> None:
    """The trap of two BOS tokens: once from the template, once from the tokenizer."""
    chat = open_chat(tiny_policy())
    tokenizer: Any = chat.tokenizer
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    row = pair_row(Chat(tokenizer), one_of(PAIR_FORMS["text"])).chosen
    assert row.ids.count(tokenizer.bos_token_id) == 1 and row.ids[0] == tokenizer.bos_token_id


def test_long_rows_are_left_out_whole_and_counted(chat: Chat) -> None:
    pairs = [one_of(row) for row in planted_pairs()[:8]]
    lengths = sorted(
        max(len(pair_row(chat, p).chosen.ids), len(pair_row(chat, p).rejected.ids)) for p in pairs
    )
    rows, found = encode_examples(pairs, lambda pair: [pair_row(chat, pair)], lengths[0], "drop")
    assert len(rows) == lengths.count(lengths[0]) and found["too_long"] == 8 - len(rows)
    assert found["longest"] == lengths[-1]
    with pytest.raises(UserError, match=r"of 8 rows have more than .* data\.max_tokens"):
        encode_examples(pairs, lambda pair: [pair_row(chat, pair)], lengths[0] - 1, "refuse")


def test_pairs_are_mined_with_their_masks(tmp_path: Path, chat: Chat) -> None:
    path = tmp_path / "episodes.jsonl"
    said = {True: make_branch(3, (2, 4), (2, 0)), False: make_branch(3, (2, 5), (3, 0))}
    rewards = {"mixed": (1.0, 0.0, None, 0.0), "easy": (1.0, 1.0), "hard": (0.0,)}
    with EpisodeWriter(path) as writer:
        for task, values in rewards.items():
            for at, value in enumerate(values):
                episode = make_episode(value, task=task, sample=at)
                messages = (Message.user(task), Message.assistant(f"{at}"))
                branch = (said[bool(value)],) if value is not None else ()
                writer.write(replace(episode, messages=messages, trajectories=branch))
    (pair,), counts = read_examples([path], "pairs")
    assert counts.ties == 2 and pair.prompt == (Message.user("mixed"),)
    rows = pair_row(chat, pair)
    assert (rows.chosen.ids, rows.chosen.mask) == (said[True].ids, said[True].mask)
    assert rows.rejected.mask == said[False].mask and 0 in rows.rejected.mask[3:]
    labels, _ = read_examples([path], "labels")
    assert sum(label.desirable for label in labels) == 3 and len(labels) == 6
    imitated, _ = read_examples([path], "conversations")
    assert len(imitated) == 3
    assert encode_response(chat, pair.prompt, pair.chosen) == rows.chosen


@pytest.mark.parametrize(
    ("reward", "branches", "said"),
    [
        (None, 1, "1 have no score, because infrastructure failed .* play them again"),
        (1.0, 2, "1 hold several branches of history .only online training"),
        (1.0, 0, "1 hold no words of the policy .see their `end`"),
    ],
)
def test_episodes_that_cannot_be_used_say_why(
    reward: float | None, branches: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "episodes.jsonl"
    messages = (Message.user("x"), Message.assistant("y" if branches else ""))
    with EpisodeWriter(path) as writer:
        kept = (make_branch(3, (2, 4), (2, 0)),) * branches
        writer.write(replace(make_episode(reward), messages=messages, trajectories=kept))
    with pytest.raises(UserError, match=f"none of 1 episodes can be used: {said}"):
        read_examples([path], "labels")


PUBLIC = {
    "dpo_en_shared.jsonl.gz": ("pairs", 147),
    "kto_en_shared.jsonl.gz": ("labels", 149),
    "llmbar_shared.jsonl": ("pairs", 210),
    "pandalm_shared.jsonl": ("pairs", 382),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_files_are_read(name: str, data_dir: Path) -> None:
    kind, count = PUBLIC[name]
    found, counts = read_examples(
        [data_dir / "preferences" / name],
        kind,
        skip_bad_rows=True,  # type: ignore[arg-type]
    )
    assert len(found) == count
    assert bool(counts.skipped) == name.startswith("pandalm")


def test_a_folder_that_a_command_wrote_stands_for_its_file(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    write_rows(tmp_path / "labels.jsonl", [{"messages": said, "opening": 1, "labels": [0.5]}])
    (steps,), _ = read_examples([tmp_path], "steps")
    assert steps.labels == (0.5,)
    with EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        for number, value in enumerate((1.0, 0.0)):
            one = make_episode(value, sample=number, trajectories=(make_branch(2, (2, 0)),))
            writer.write(replace(one, messages=(ASKED, Message.assistant(str(number)))))
    labels, counts = read_examples([tmp_path], "labels")
    assert [one.desirable for one in labels] == [True, False] and counts.rows == 2
    assert len(read_examples([tmp_path], "steps")[0]) == 1
    with pytest.raises(UserError, match="cannot be read as a saved dataset"):
        read_examples([tmp_path.parent], "steps")
