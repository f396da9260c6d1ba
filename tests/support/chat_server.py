"""A small OpenAI-compatible server on the loopback address: it answers as a script says, and ends
with its block.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """One HTTP answer; `hang` sends none until the server ends, `cut` only half of the body."""

    body: object
    status: int = 200
    hang: bool = False
    kind: str = "application/json"
    cut: bool = False
    after_s: float = 0.0
    wait: tuple[str, str] = ("retry-after-ms", "5")


@dataclass
class ChatServer:
    """What was asked, and where."""

    url: str
    requests: list[dict] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def completion(
    content: str | None = "hello", *, finish: str = "stop", calls=None, usage=(7, 3), **message
) -> Answer:
    said = {"role": "assistant", "content": content, **message}
    if calls is not None:
        said["tool_calls"] = [
            {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    counted = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    choices = [{"index": 0, "finish_reason": finish, "message": said}]
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": counted,
    }
    return Answer(body)


def failure(status: int, message: str = "no", **error) -> Answer:
    return Answer({"error": {"message": message, **error}}, status)


@contextmanager
def chat_server(*answers: Answer | Callable[[dict], Answer]) -> Iterator[ChatServer]:
    """Answers requests in turn, then the last answer for good; a function answers by the JSON."""
    due, lock, ended = list(answers), threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                server.requests.append(request)
                server.keys.append(self.headers["authorization"])
                answer = due.pop(0) if len(due) > 1 else due[0]
            answer = answer(request) if callable(answer) else answer
            if answer.hang:
                ended.wait(30)
                self.close_connection = True
                return
            ended.wait(answer.after_s)
            body = (
                answer.body.encode()
                if isinstance(answer.body, str)
                else json.dumps(answer.body).encode()
            )
            self.send_response(answer.status)
            for name, value in (
                ("content-type", answer.kind),
                ("content-length", len(body)),
                answer.wait,
            ):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if answer.cut else body)
            self.close_connection = self.close_connection or answer.cut

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = ChatServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
        thread = threading.Thread(
            target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            http.shutdown()
            thread.join()
