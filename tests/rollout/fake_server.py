"""A server with vLLM's endpoints and no model, whose answers are a function of the request; in a thread, or as a process.

python fake_server.py --host 127.0.0.1 --port PORT ...
"""

import argparse
import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from safetensors import safe_open

from rlpost.distributed import Link

Behave = Callable[
    [dict[str, Any]], str
]  # of a generate request: "answer", "error", "drop", "abort", "refuse" or "hang"


def token_ids(body: dict[str, Any]) -> list[int]:
    return [(sum(body["token_ids"]) + body["sampling_params"].get("seed", 0) * 31 + i) % 251 for i in range(3)]


class FakeServer:
    """Log-probabilities are minus the weight `w` that was loaded last, 0 before.

    Attributes:
        asked: every request but health checks: its path and its body.
        expanded: a prompt's ids with its images', for who asks for them.
        dies: when weights are sent to it over the network.
    """

    def __init__(self, behave: Behave = lambda body: "answer", dev_mode: bool = True) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.frozen = False
        self.expanded: list[int] = []
        self.dies = self.dead = False
        self._behave, self._dev_mode = behave, dev_mode
        self._label, self._weight = "default", 0.0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        if self._dev_mode:
            app.router.add_post("/{path:.*}", self._control)
        return app

    def __enter__(self) -> "FakeServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self) -> web.AppRunner:
        runner = web.AppRunner(self.app(), shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _health(self, request: web.Request) -> web.Response:
        if self.frozen:
            await asyncio.sleep(3600)
        return web.Response(status=503 if self.dead else 200)

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path_qs, body))
        if self.frozen:
            await asyncio.sleep(3600)
        if request.path == "/update_weight_version":
            self._label = body["new_version"]
        if request.path == "/collective_rpc":
            await asyncio.to_thread(getattr(self, f"_{body['method']}"), **body["kwargs"])
            if self.dead:
                request.transport.close()
        return web.json_response({"results": [None]})

    def _load_policy(self, path: str = "") -> None:
        if path:
            with safe_open(path, framework="np") as weights:
                self._weight = float(weights.get_tensor("w")[0])

    def _join_link(self, **where: Any) -> None:
        self._link = Link(**where, timeout_s=20)

    def _receive_policy(self) -> None:
        if self.dies:
            self.dead = True
            self._link.close()
        else:
            self._received = dict(self._link.receive())

    def _load_received(self) -> None:
        self._weight = float(self._received["w"][0])

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path_qs, body))
        how = self._behave(body)
        if how == "hang":
            await asyncio.sleep(3600)
        if how == "drop":
            request.transport.close()
        if how in ("error", "refuse"):
            return web.json_response({"error": "no room"}, status=500 if how == "error" else 400)
        ids = token_ids(body)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token, "logprob": -self._weight} for token in ids]},
            "finish_reason": "abort" if how == "abort" else "length",
            "weight_versions": [{"version": self._label, "start": 0, "end": len(ids)}],
        }
        prompt = {"prompt_token_ids": self.expanded} if body.get("return_token_ids") else {}
        return web.json_response({"choices": [choice], **prompt})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    web.run_app(FakeServer().app(), host=arguments.host, port=arguments.port, print=None)
