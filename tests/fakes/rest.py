"""A REST gateway of canned answers: streams numbered words, with usage and speculative figures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeRest(ThreadingHTTPServer):
    """Answers with `words` words, `pause_s` apart; a prompt with "fail" in it is refused, one with
    "break" breaks off after a word.

    Attributes:
        bodies: every request body with its path, in order of arrival.
        most: the largest number of requests that ran at once.
    """

    daemon_threads = True
    request_queue_size = 128
    words = 5
    pause_s = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeRest
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.bodies.append((self.path, body))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            self._answer(body)
        except BrokenPipeError:
            pass
        finally:
            with server.lock:
                server.running -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        text = json.dumps(body.get("messages") or body.get("prompt"))
        if "fail" in text:
            self._json(400, {"error": {"message": "messages: not today", "param": "messages"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        chat = "messages" in body
        for number in range(self.server.words):
            word = f"w{number} "
            said = {"delta": {"content": word}} if chat else {"text": word}
            self._event({"choices": [{"index": 0, **said, "finish_reason": None}]})
            if "break" in text:
                self._event({"error": {"message": "target lost"}})
                return
            time.sleep(self.server.pause_s)
        stats = {"steps": 3, "tau": 3.0, "accepted": [2, 0, 3], "nodes": [16, 1, 16]}
        last = {"delta": {}} if chat else {"text": ""}
        self._event({"choices": [{**last, "finish_reason": "stop"}], "speculative": stats})
        usage = {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17}
        self._event({"choices": [], "usage": usage, "speculative": stats})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def fake_rest() -> Iterator[FakeRest]:
    """A running server on a free port."""
    server = FakeRest()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
