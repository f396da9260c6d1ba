"""A report page as a browser sees it, and episodes to make one of."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from agentrl.records.files import EpisodeWriter
from agentrl.report.page import write_report
from agentrl.trajectory import Episode, EpisodeKey, Segment, Trajectory
from agentrl.types import EndReason, Message, Score, TaskView


class Page(HTMLParser):
    """Tags, attributes and texts of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.raw = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def data(self):
        return json.loads(self.scripts[0])


def report(folder, tokenizer=None):
    path = write_report(folder, tokenizer)
    assert path == folder / "report.html"
    return Page(path.read_text())


def episode(
    sample=0,
    text="hi",
    *,
    step=0,
    reward: float | None = 1.0,
    end=EndReason.ANSWERED,
    tokens=3,
    **changes,
):
    prompt = Segment.prompt(range(tokens))
    fields = {
        "key": EpisodeKey("run", step, "task", sample),
        "env": "e-v0",
        "task": TaskView(id="task", instruction="do"),
        "start": "",
        "messages": (Message.user("do"), Message.assistant(text)),
        "end": end,
        "score": Score.failed("gone") if reward is None else Score(reward),
        "trajectories": (Trajectory((prompt, Segment.sampled([7, 8], [-0.25, -1.5], 4, "stop"))),),
    }
    return Episode(**{**fields, **changes})


def save(folder, episodes):
    with EpisodeWriter(folder / "episodes.jsonl") as writer:
        for item in episodes:
            writer.write(item)
