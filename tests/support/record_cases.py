"""Episodes as hypothesis draws them, a simple one, and a file of some."""

from __future__ import annotations

from hypothesis import strategies as st

from agentrl.records.files import EpisodeWriter
from agentrl.trajectory import Counts, Episode, EpisodeKey, Segment, Trajectory
from agentrl.types import BadCall, Ending, EndReason, Message, Score, TaskView, ToolCall

FINITE = st.floats(allow_nan=False, allow_infinity=False)


CLEAN = st.text(max_size=12)


TURNS = st.dictionaries(st.text(max_size=12), st.lists(FINITE, max_size=3).map(tuple), max_size=2)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | CLEAN
    | st.sampled_from(["\ud800", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CLEAN, inner, max_size=3),
    max_leaves=6,
)


OBJECT = st.dictionaries(CLEAN, JSON, max_size=3)


PATHS = st.from_regex(r"[a-zé][a-z0-9_]{0,6}(/[a-z]{1,4})?\.py", fullmatch=True)


IDS = st.lists(st.integers(0, 200_000), max_size=6)


CALLS = st.builds(ToolCall, CLEAN, OBJECT, CLEAN) | st.builds(BadCall, CLEAN, CLEAN)


MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "tool"]),
    CLEAN,
    name=CLEAN,
    tool_call_id=CLEAN,
    reasoning=CLEAN,
) | st.builds(
    Message,
    st.just("assistant"),
    CLEAN,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
    reasoning=CLEAN,
)


@st.composite
def sampled(draw):
    logprobs = draw(st.lists(st.floats(-1e6, 1e-5), min_size=1, max_size=6))
    ids = draw(st.lists(st.integers(0, 200_000), min_size=len(logprobs), max_size=len(logprobs)))
    return Segment.sampled(
        ids, logprobs, draw(st.integers(0, 99)), draw(st.sampled_from(["stop", "length"]))
    )


LATER = st.lists(sampled() | IDS.map(Segment.observation), max_size=4)


@st.composite
def branches(draw):
    result = []
    for _ in range(draw(st.integers(0, 3))):
        if result and draw(st.booleans()):
            parent = draw(st.sampled_from(result))
            branch = parent.fork(draw(st.integers(1, len(parent.segments))))
        else:
            branch = Trajectory((Segment.prompt(draw(IDS)),))
        result.append(branch.extend(*draw(LATER)))
    return tuple(result)


@st.composite
def episodes(draw):
    end = draw(st.sampled_from(EndReason))
    failed = end.ending is Ending.FAILED
    parts = draw(st.dictionaries(CLEAN, st.floats(allow_nan=False), max_size=3))
    return Episode(
        key=EpisodeKey(
            draw(CLEAN),
            draw(st.integers()),
            draw(CLEAN),
            draw(st.integers()),
            draw(st.integers(0, 3)),
        ),
        env=draw(CLEAN),
        task=TaskView(
            id=draw(st.text(min_size=1, max_size=5)),
            instruction=draw(CLEAN),
            files=draw(st.dictionaries(PATHS, CLEAN, max_size=2)),
            artifacts=draw(st.lists(PATHS, max_size=2).map(tuple)),
            threshold=draw(FINITE),
            seed=draw(st.integers()),
            metadata=draw(OBJECT),
        ),
        start=draw(CLEAN),
        messages=draw(st.lists(MESSAGES, max_size=4).map(tuple)),
        end=end,
        score=Score(None, parts, "it broke")
        if failed
        else Score(draw(FINITE), parts, draw(CLEAN), draw(TURNS)),
        trajectories=draw(branches()),
        counts=Counts(
            turns=draw(st.integers(0)),
            wall_s=draw(FINITE),
            usd=draw(st.none() | FINITE),
            by_tool=draw(st.dictionaries(CLEAN, st.integers())),
        ),
        artifacts=draw(
            st.dictionaries(PATHS, st.binary(max_size=8) | CLEAN.map(str.encode), max_size=3)
        ),
        side_effects=draw(st.none() | st.dictionaries(CLEAN, CLEAN, max_size=2)),
        failure=draw(CLEAN),
    )


def simple(sample=0, reward=1.0, **changes):
    fields = {
        "key": EpisodeKey("run", 0, "task", sample),
        "env": "calc-v0",
        "task": TaskView(id="task", instruction="add"),
        "start": "s",
        "messages": (Message.user("add"), Message.assistant("3")),
        "end": EndReason.ANSWERED,
        "score": Score(reward),
    }
    return Episode(**{**fields, **changes})


def write(path, *episodes):
    with EpisodeWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)
