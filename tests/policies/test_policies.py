"""TokenPolicy keeps every id that it was given, and token budgets have their endings."""

import asyncio
from dataclasses import replace

import pytest
from helpers import Echo, FakeEngine, call, make_task, play_one, says, script
from hypothesis import given, settings
from hypothesis import strategies as st
from spelled_tokens import CALL, CHAT, STOP, spelled
from tiny_tokenizers import tiny

from agentrl.chat.tokens import Chat
from agentrl.engines.base import Sampling
from agentrl.policies.base import TokenPolicy, noop, recorded
from agentrl.trajectory import SegmentKind
from agentrl.types import EndReason, Limits


def play(engine, limits=None, sampling=None, env=Echo):
    class Limited(env):
        pass

    Limited.limits = limits or env.limits
    return play_one(Limited, TokenPolicy(engine, CHAT, sampling))


def test_ids_that_were_sampled_are_kept_as_they_are():
    first, last = [*spelled(CALL), STOP], [*spelled("yes"), STOP]
    assert (
        CHAT.tokenizer.encode(CALL, add_special_tokens=False) != first[:-1]
    )  # the split is not canonical
    engine = FakeEngine(first, last, stop_ids=CHAT.stop_ids)
    episode = play(engine)
    assert episode.end is EndReason.ANSWERED and episode.score.value == 1.0
    assert [message.content for message in episode.messages if message.role == "tool"] == ["hello"]
    (branch,) = episode.trajectories
    kinds = [segment.kind.value for segment in branch.segments]
    assert kinds == ["prompt", "sampled", "observation", "sampled"]
    assert branch.segments[1].ids == tuple(first) and branch.segments[3].ids == tuple(last)
    assert (
        engine.prompts[1] == branch.ids[: len(engine.prompts[1])]
    )  # what it was asked to continue is what is kept
    assert branch.ids == engine.prompts[1] + tuple(last)
    assert branch.trained == episode.counts.sampled_tokens == len(first) + len(last)
    assert episode.counts.prompt_tokens == len(branch.ids) - branch.trained


def test_every_observation_of_a_turn_is_in_the_context():
    turn = [*spelled(CALL + CALL.replace("hello", "world")), STOP]
    engine = FakeEngine(turn, [*spelled("yes"), STOP], stop_ids=CHAT.stop_ids)
    episode = play(engine)
    (branch,) = episode.trajectories
    text = CHAT.tokenizer.decode(list(branch.segments[2].ids))
    assert text.index("hello") < text.index("world") and text.endswith("<|im_start|>assistant\n")
    assert episode.counts.tool_calls == 2 and episode.score.value == 1.0


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_any_ids_come_back_unchanged(turns):
    """Whatever bytes are sampled: every sampled segment is one of the engine's answers, in its
    order.
    """

    class Deaf(Echo):
        async def on_text(self, message):
            from agentrl.env import Step
            from agentrl.types import Message

            return Step((Message.user("more"),))

    turns = [[token for token in turn if token not in CHAT.stop_ids] + [STOP] for turn in turns]
    engine = FakeEngine(*turns, stop_ids=CHAT.stop_ids)
    episode = play(engine, Limits(turns=len(turns), bad_calls=99), env=Deaf)
    said = [s.ids for s in episode.trajectories[0].segments if s.kind is SegmentKind.SAMPLED]
    assert said == [tuple(turn) for turn in turns[: len(said)]] and len(said) == len(engine.prompts)
    for prompt in engine.prompts:
        assert episode.trajectories[0].ids[: len(prompt)] == prompt


def test_a_turn_that_is_cut_ends_the_episode_and_is_graded():
    episode = play(FakeEngine(spelled("yes or no"), stop_ids=CHAT.stop_ids), Limits(turn_tokens=3))
    assert episode.end is EndReason.MAX_TOKENS and episode.truncated and episode.score.value == 1.0
    assert episode.trajectories[0].segments[-1].finish == "length"


def test_the_budget_of_an_episode_ends_it():
    turn = [*spelled(CALL), STOP]
    engine = FakeEngine(turn, stop_ids=CHAT.stop_ids)
    episode = play(engine, Limits(episode_tokens=2 * len(turn), turn_tokens=500, tool_calls=9))
    assert episode.end is EndReason.MAX_TOKENS and episode.counts.sampled_tokens == 2 * len(turn)
    branch = episode.trajectories[0]
    assert (
        branch.segments[-1].kind is SegmentKind.SAMPLED
    )  # an observation that nobody read is no part of it
    engine = FakeEngine(turn, stop_ids=CHAT.stop_ids)
    episode = play(engine, Limits(episode_tokens=len(turn) + 5, turn_tokens=500))
    assert engine.asked[-1].max_tokens == 5 and episode.counts.sampled_tokens == len(turn) + 5


def test_the_context_ends_it():
    prompt = len(CHAT.prompt_ids([_user()], Echo().tools))
    engine = FakeEngine(spelled("x" * 50), stop_ids=CHAT.stop_ids, context_length=prompt + 7)
    episode = play(engine)
    assert episode.end is EndReason.CONTEXT_LENGTH and engine.asked[0].max_tokens == 7
    assert len(episode.trajectories[0].ids) == prompt + 7
    full = play(FakeEngine([STOP], stop_ids=CHAT.stop_ids, context_length=prompt))
    assert (
        full.end is EndReason.CONTEXT_LENGTH and full.trajectories == () and full.score.value == 0.0
    )


def test_sampling_settings_bound_the_budget_too():
    engine = FakeEngine(spelled("x" * 50), stop_ids=CHAT.stop_ids)
    assert play(engine, sampling=Sampling(max_tokens=4)).counts.sampled_tokens == 4


def test_an_engine_that_lies_about_stopping_is_an_engine_error():
    class Liar(FakeEngine):
        async def generate(self, *args, **kwargs):
            return replace(await super().generate(*args, **kwargs), finish="stop")

    episode = play(Liar(spelled(CALL)))
    assert episode.end is EndReason.ENGINE_ERROR and episode.score.value is None


def _user():
    return Echo.prompt(_Opened())[0]


class _Opened(Echo):
    task = make_task().view()


def test_a_template_that_rewrites_history_opens_branches():
    chat = Chat(tiny("qwen3_thinking"), on_rewrite="branch")
    stop = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    turn = chat.tokenizer.encode("hm\n</think>\n\nhello", add_special_tokens=False)

    class Talk(Echo):
        limits = Limits(turns=3)

        async def on_text(self, message):
            from agentrl.env import Step
            from agentrl.types import Message

            return Step((Message.user("more"),))

    engine = FakeEngine([*turn, stop], stop_ids=chat.stop_ids)
    episode = play_one(Talk, TokenPolicy(engine, chat))
    assert len(episode.trajectories) == 3
    assert sum(branch.trained for branch in episode.trajectories) == 3 * (len(turn) + 1)
    assert [branch.segments[0].ids for branch in episode.trajectories] == engine.prompts


def test_scripted_policies_leave_no_tokens():
    episode = play_one(Echo, script(says(call("say", text="a")), says(content="yes")))
    assert episode.trajectories == () and episode.counts.sampled_tokens == 0
    again = play_one(Echo, recorded(episode))
    assert again.messages == episode.messages and again.score == episode.score
    assert play_one(Echo, noop()).end is EndReason.ANSWERED


def test_seeds_of_turns_differ_and_repeat():
    class Seeds(FakeEngine):
        async def generate(self, prompt_ids, sampling, *, seed):
            seeds.append(seed)
            return await super().generate(prompt_ids, sampling, seed=seed)

    runs = []
    for run_seed in (0, 0, 1):
        seeds: list[int] = []
        engine = Seeds([*spelled(CALL), STOP], stop_ids=CHAT.stop_ids)
        play_one(Echo, TokenPolicy(engine, CHAT), seed=run_seed)
        runs.append(seeds)
    assert runs[0] == runs[1] != runs[2] and len(set(runs[0])) == len(runs[0]) == 6
    assert all(0 <= seed < 2**63 for seed in runs[0])


def test_a_player_needs_no_loop_of_its_own():
    async def both():
        return await asyncio.gather(*(asyncio.to_thread(play_one, Echo, noop()) for _ in range(3)))

    assert [episode.end for episode in asyncio.run(both())] == [EndReason.ANSWERED] * 3
    with pytest.raises(ValueError, match="out of range"):
        Sampling(temperature=-1)
