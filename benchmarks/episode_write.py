"""What the record of one episode of five turns costs: its tokens and their log-probabilities,
looked through for secrets, written as one line and handed to the operating system.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from agentrl import EndReason, Message, Score, TaskView
from agentrl.records.files import EpisodeWriter
from agentrl.trajectory import Episode, EpisodeKey, Segment, Trajectory
from benchmarks.row import Row, alone

EPISODES, TURNS, SAMPLED, OBSERVED = 300, 5, 30, 24


def measure() -> Row:
    """Median milliseconds to write one episode."""
    seconds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EpisodeWriter(Path(folder) / "episodes.jsonl") as writer,
    ):
        for number in range(EPISODES):
            episode = _episode(number)
            begun = time.perf_counter()
            writer.write(episode)
            seconds.append(time.perf_counter() - begun)
    return alone(
        "episode_write",
        median(seconds) * 1e3,
        "ms",
        EPISODES,
        promise="at most 1 ms",
        notes=f"{SAMPLED + TURNS * (SAMPLED + OBSERVED)} tokens, {TURNS * SAMPLED} of them sampled",
    )


def _episode(number: int) -> Episode:
    """Half of its tokens are sampled ones, each with a log-probability of its own."""
    segments = [Segment.prompt(range(SAMPLED))]
    for turn in range(TURNS):
        logprobs = [-(turn + 1) / (token + 3) for token in range(SAMPLED)]
        segments.append(Segment.sampled(range(SAMPLED), logprobs, 7, "stop"))
        segments.append(Segment.observation(range(1000, 1000 + OBSERVED)))
    return Episode(
        key=EpisodeKey("run", 0, "task", number),
        env="calc-v0",
        task=TaskView(id="task", instruction="Add two numbers."),
        start="s",
        messages=(Message.user("Add two numbers."), Message.assistant("3")),
        end=EndReason.ANSWERED,
        score=Score(1.0),
        trajectories=(Trajectory(tuple(segments)),),
    )
