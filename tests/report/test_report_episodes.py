"""The episodes of a report: which are shown, their tokens, and what their tools answered."""

from __future__ import annotations

import pytest
from report_cases import episode, report, save

from agentrl.report import viewer
from agentrl.trajectory import EpisodeKey
from agentrl.types import EndReason, Message, ToolCall


def test_tokens_carry_their_author_text_and_logprob(run):
    folder, words = run
    page = report(folder, words)
    row = next(row for row in page.data["episodes"] if len(row["branches"]) == 2)
    first, second = row["branches"]
    assert second["shared"] == 3 and second["segments"][:3] == first["segments"][:3]
    kinds = [row["segments"][index]["kind"] for index in first["segments"]]
    assert kinds[:3] == ["p", "s", "o"]
    sampled = row["segments"][first["segments"][1]]
    assert len(sampled["logprobs"]) == len(sampled["ids"]) and sampled["finish"] == "stop"
    text = "".join(page.data["vocab"][str(token)] for token in sampled["ids"])
    assert "<tool_call>" in text and text.endswith("<|end|>")


def test_a_page_without_tokenizer_says_so(run):
    folder, words = run
    assert report(folder).data["vocab"] == {} and "tokens show as ids" in report(folder).text
    assert "tokens show as ids" not in report(folder, words).text


def test_the_newest_checkpoint_tells_token_texts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    save(tmp_path, [episode()])
    for step, text in ((9, "old"), (10, "new")):
        folder = tmp_path / "checkpoints" / f"step_{step}" / "model"
        folder.mkdir(parents=True)
        model = tokenizers.models.WordLevel({text: 7, "\u2581b": 8, "[UNK]": 9}, unk_token="[UNK]")
        tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    vocab = report(tmp_path).data["vocab"]
    assert vocab["7"] == "new" and vocab["8"].endswith("b")


def test_parts_of_characters_show_as_pieces():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    ids = made.encode("é a").ids
    texts = viewer.token_texts([{"segments": [{"ids": ids}]}], made)
    assert [texts[str(token)] for token in ids] == ["Ã", "©", " ", "a"]


def test_episodes_are_chosen_widely():
    lights = []
    for step in range(50):
        for sample in range(4):
            end, reward = EndReason.ANSWERED, float(sample == 0)
            if sample == 3 and step % 10 == 5:
                end, reward = EndReason.MAX_TURNS, 0.0
            if sample == 2 and step % 10 == 6:
                end, reward = EndReason.SANDBOX_LOST, None
            key = EpisodeKey("run", step, "task", sample, phase="eval" if sample == 1 else "train")
            lights.append(viewer.Light.of(episode(key=key, reward=reward, end=end)))
    chosen = viewer.choose(lights)
    assert len(chosen) == 60 and chosen == viewer.choose(lights) != viewer.choose(lights, seed=1)
    tags = {tag for reasons in chosen.values() for tag in reasons}
    assert tags == {
        "first step",
        "last step",
        "top reward",
        "lowest reward",
        "random",
        "truncated",
        "infra",
        "held-out",
    }
    assert {key.step for key, reasons in chosen.items() if "last step" in reasons} == {49}
    assert len({key.step for key in chosen}) > 20
    assert len(viewer.choose(lights[:7])) == 7 and viewer.choose([]) == {}


def test_the_last_record_of_a_key_is_shown(tmp_path):
    save(tmp_path, [episode(text="first try", reward=0.0), episode(text="after resume")])
    (row,) = report(tmp_path).data["episodes"]
    assert row["messages"][1]["content"] == "after resume" and row["reward"] == 1.0


def test_tool_outcomes_are_read_off_the_fixed_form():
    call = ToolCall("grep", {})
    answers = [
        "ok",
        "error: timeout: grep took longer than 3 s",
        "error: no such word",
        "error: tool_error: KeyError: x",
    ]
    light = viewer.Light.of(episode(messages=tuple(Message.tool(text, call) for text in answers)))
    assert light.calls == {"grep": 4} and light.errors == {"grep": 2}
