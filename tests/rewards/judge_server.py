"""A stub of a judge that speaks the real protocol: POST /v1/chat/completions, status codes and all."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Judge:
    """What was asked, and how many requests were open at once."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    open_requests: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def judge_server(reply: Callable[[str, int], tuple[int, str]]) -> Iterator[Judge]:
    """Args: reply: status and text for the last message and the number of the request."""
    judge = Judge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with judge.lock:
                judge.asked.append(request)
                judge.keys.append(self.headers["Authorization"])
                judge.open_requests += 1
                judge.most_at_once = max(judge.most_at_once, judge.open_requests)
                number = len(judge.asked)
            status, text = reply(request["messages"][-1]["content"], number)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
            body = json.dumps(answer if status == 200 else {"error": {"message": text}}).encode()
            with judge.lock:
                judge.open_requests -= 1
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
