"""rollout=vllm_server: what it tells servers and makes of their answers, servers it starts, and real ones in a real run."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from PIL import Image
from transformers import AutoModelForCausalLM

from rlpost.data.prompts import PromptFormat
from rlpost.data.split import user_message
from rlpost.errors import UserError
from rlpost.rollout.engine import Sampling
from rlpost.rollout.server import VLLMServers
from rlpost.rollout.server_pool import Server
from rlpost.types import Example, Prompt
from tests.rollout.fake_server import FakeServer, token_ids
from tests.rollout.test_engines import generate, make_engine, restore
from tests.runs import TINY, rows, start, wait_for_steps, weights

FAKE = Path(__file__).with_name("fake_server.py")


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(Example((), None), (5, 6, i), "") for i in range(count)]


def servers(directory: Path, log_dir: Path, *urls: str, **settings: Any) -> VLLMServers:
    return VLLMServers(directory, (2,), 64, str(log_dir), urls=urls, health_s=2.0, **settings)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def test_new_weights_come_with_their_version_and_the_file_is_gone(
    fake: FakeServer, tiny_dir: Path, tmp_path: Path
) -> None:
    engine = servers(tiny_dir, tmp_path, fake.url, weights_dir=str(tmp_path))
    prompts, seeds = prompts_of(5), [11, 12, 13, 14, 15]
    try:
        for version, weight in ((0, 0.0), (3, 0.25), (4, 0.5)):
            if version:
                fake.asked.clear()
                engine.load_weights([("w", torch.tensor([weight]))], version)
                assert [path.partition("?")[0] for path, _ in fake.asked] == [
                    *("/pause", "/collective_rpc", "/update_weight_version"),
                    *("/reset_prefix_cache", "/reset_encoder_cache", "/resume"),
                ]
                assert list(tmp_path.iterdir()) == []
            fake.asked.clear()
            done = dict(engine.generate(prompts, seeds, Sampling(max_tokens=3)))
            assert sorted(done) == [0, 1, 2, 3, 4]
            assert fake.asked[0][0] == "/reset_prefix_cache"
            for place, completion in done.items():
                body = {"token_ids": prompts[place].token_ids, "sampling_params": {"seed": seeds[place]}}
                assert list(completion.token_ids) == token_ids(body)
                assert completion.rollout_logprobs == (-weight,) * 3
                assert completion.policy_version == version
                assert completion.finish_reason == "length"
        assert engine.metrics() == {"servers": 1, "retries": 0, "moved": 0}
    finally:
        engine.close()


def test_weights_go_over_the_network_and_one_that_dies_of_it_is_lost(tiny_dir: Path, tmp_path: Path) -> None:
    prompts, sampling = prompts_of(6), Sampling(max_tokens=3)
    with FakeServer() as first, FakeServer() as second:
        engine = servers(tiny_dir, tmp_path, first.url, second.url, transfer="network", weights_dir=str(tmp_path))
        try:
            for version, left in ((1, 2), (2, 2), (3, 1), (4, 1)):
                second.dies = version == 3
                engine.load_weights([("v", torch.ones(2, 3)), ("w", torch.tensor([version / 4]))], version)
                assert list(tmp_path.iterdir()) == []
                done = dict(engine.generate(prompts, range(6), sampling))
                assert {c.rollout_logprobs for c in done.values()} == {(-version / 4,) * 3}
                assert {c.policy_version for c in done.values()} == {version}
                assert engine.metrics()["servers"] == left
            links = [body for path, body in first.asked if body.get("method") == "join_link"]
            assert [(body["kwargs"]["place"], body["kwargs"]["size"]) for body in links] == [(1, 3), (1, 2)]
        finally:
            engine.close()


def test_a_server_that_was_gone_before_does_not_hold_the_weights_up(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer() as first:
        with FakeServer() as second:
            engine = servers(tiny_dir, tmp_path, first.url, second.url, transfer="network", retries=0)
        try:
            engine.load_weights([("w", torch.tensor([0.5]))], 1)
            done = dict(engine.generate(prompts_of(6), range(6), Sampling(max_tokens=3)))
            assert {c.rollout_logprobs for c in done.values()} == {(-0.5,) * 3}
            assert [body["kwargs"]["size"] for _, body in first.asked if body.get("method") == "join_link"] == [2]
        finally:
            engine.close()


def test_weights_of_somebody_else_are_refused(fake: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    first, second = (servers(tiny_dir, tmp_path, fake.url) for _ in range(2))
    try:
        assert len(list(second.generate(prompts_of(2), [0, 1], Sampling(max_tokens=3)))) == 2
        with pytest.raises(RuntimeError, match="sampled with weights that this run did not send it"):
            list(first.generate(prompts_of(2), [0, 1], Sampling(max_tokens=3)))
    finally:
        first.close()
        second.close()


def test_ranks_share_the_servers_out(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with FakeServer() as a, FakeServer() as b, FakeServer() as c:
        engine = servers(tiny_dir, tmp_path, a.url, b.url, c.url)
        engine.close()
        assert (bool(a.asked), bool(b.asked), bool(c.asked)) == (False, True, False)


def test_a_server_that_cannot_be_used_is_a_user_error(fake: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.engine.urls: http://127.0.0.1:9/health does not answer: Client"):
        servers(tiny_dir, tmp_path, fake.url, "http://127.0.0.1:9")
    with FakeServer(dev_mode=False) as plain, pytest.raises(UserError, match=r"HTTP 404.*VLLM_SERVER_DEV_MODE=1"):
        servers(tiny_dir, tmp_path, plain.url)


def test_images_go_as_the_trainer_sees_them(fake: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    transparent = Image.new("RGBA", (3, 2), (200, 100, 50, 0))
    transparent.save(tmp_path / "image.png")
    path = str(tmp_path / "image.png")
    prompt = Prompt(Example((), None, images=(path,)), (5, 6, 6), "", unexpanded_ids=(5, 6))
    engine = servers(tiny_dir, tmp_path, fake.url)
    try:
        fake.expanded = [5, 6, 6]
        assert len(list(engine.generate([prompt], [0], Sampling(max_tokens=3)))) == 1
        (body,) = (body for path, body in fake.asked[-1:] if path == "/inference/v1/generate")
        assert body["token_ids"] == [5, 6]
        (part,) = body["content_parts"]
        assert part["type"] == "image_url"
        sent = Image.open(io.BytesIO(base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))))
        assert (sent.mode, sent.tobytes()) == ("RGB", bytes([200, 100, 50]) * 6)  # not on a white ground
        fake.expanded = [5, 6, 6, 6]
        with pytest.raises(RuntimeError, match="expands images differently"):
            list(engine.generate([prompt], [0], Sampling(max_tokens=3)))
    finally:
        engine.close()


def script(directory: Path, text: str) -> str:
    """Stands for Python in `python -m vllm...`."""
    file = directory / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_lost_server_of_the_run_is_started_again_and_gets_the_weights(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = script(
        tmp_path,
        f'echo "$$ $VLLM_SERVER_DEV_MODE $OMP_NUM_THREADS $TORCH_COMPILE_DISABLE $RANK." >> {tmp_path}/started\n'
        f'shift 2\nexec {sys.executable} {FAKE} "$@"',
    )
    monkeypatch.setattr(sys, "executable", fake)
    monkeypatch.setenv("RANK", "0")
    engine = servers(tiny_dir, tmp_path / "logs", num_servers=2, threads=3)
    prompts, seeds, sampling = prompts_of(6), range(6), Sampling(max_tokens=3)

    def started() -> list[str]:
        return (tmp_path / "started").read_text().splitlines()

    try:
        assert len(list(engine.generate(prompts, seeds, sampling))) == 6
        assert [line.partition(" ")[2] for line in started()] == ["1 3 1 ."] * 2  # not taken for a rank
        os.kill(int(started()[0].split()[0]), signal.SIGKILL)
        assert sorted(place for place, _ in engine.generate(prompts, seeds, sampling)) == list(range(6))
        assert engine.metrics()["servers"] == 1
        version = 0
        while engine.metrics()["servers"] < 2:
            version += 1
            engine.load_weights([("w", torch.tensor([float(version)]))], version)
            done = dict(engine.generate(prompts, seeds, sampling))
            assert {c.policy_version for c in done.values()} == {version}
            assert {c.rollout_logprobs for c in done.values()} == {(-float(version),) * 3}
            time.sleep(0.1)
        assert len(started()) == 3
    finally:
        engine.close()
    for line in started():
        assert not Path(f"/proc/{line.split()[0]}").exists()


def test_a_server_that_does_not_come_up_is_explained(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = "(EngineCore pid=7) ERROR 11-30 16:00:00 [core.py:1]"
    lines = ["Traceback (most recent call last):", "ValueError: no room for keys", "RuntimeError: see above"]
    printed = "\n".join(f"{prefix} {line}" for line in lines)
    monkeypatch.setattr(sys, "executable", script(tmp_path, f"echo '{printed}' >&2; exit 3"))
    with pytest.raises(UserError) as raised:
        servers(tiny_dir, tmp_path / "logs")
    log = tmp_path / "logs/rank-0-server-0.log"
    assert str(raised.value) == (
        "rollout.engine: a server did not come up: its process ended (exit code 3): ValueError: no room for keys "
        f"(all it printed is in {log})"
    )
    assert "Traceback" in log.read_text()


def test_servers_end_with_a_process_that_is_killed(tiny_dir: Path, tmp_path: Path) -> None:
    fake = script(tmp_path, f'echo $$ > {tmp_path}/pid\nshift 2\nexec {sys.executable} {FAKE} "$@"')
    program = (
        "import sys, pathlib, time\n"
        f"sys.executable = {fake!r}\n"
        "from rlpost.rollout.server import VLLMServers\n"
        f"engine = VLLMServers(pathlib.Path({str(tiny_dir)!r}), (2,), 64, {str(tmp_path / 'logs')!r})\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    server = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    assert server.exists()
    process.kill()
    process.communicate()
    while server.exists() and "State:\tZ" not in (server / "status").read_text():
        time.sleep(0.05)


@pytest.fixture(scope="module")
def real(
    tiny_dir: Path, tiny_end_tokens: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServers]:
    """Two vLLM servers."""
    logs = tmp_path_factory.mktemp("logs")
    engine = VLLMServers(tiny_dir, tiny_end_tokens, 256, str(logs), num_servers=2, threads=1, kv_cache_bytes=2**26)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)  # vLLM imports itself six times
def test_servers_sample_what_the_engine_in_the_process_does(
    real: VLLMServers, tiny_dir: Path, tiny_end_tokens: tuple[int, ...], tiny_tokenizer: Any
) -> None:
    texts = ["hi", "What is 3 + 4?", "a much longer question, " * 4]
    prompts = 4 * PromptFormat().apply([Example(user_message(t), None) for t in texts], tiny_tokenizer, "training")
    inside = make_engine("vllm", tiny_dir, tiny_end_tokens)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    samplings = [
        Sampling(max_tokens=24, temperature=0),
        Sampling(max_tokens=24, temperature=0.7, top_p=0.9, stop=("a", "e")),
        Sampling(max_tokens=24, bad_words=("b",), logit_bias={50: 3.0}),
        Sampling(max_tokens=24, choice=("yes", "no", "maybe")),
    ]
    try:
        for version in (0, 7):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
                restore(inside, model, version)
                restore(real, model, version)
            for sampling in samplings:
                expected = generate(inside, prompts, range(len(prompts)), sampling)
                for ours, theirs in zip(generate(real, prompts, range(len(prompts)), sampling), expected, strict=True):
                    assert replace(ours, rollout_logprobs=()) == replace(theirs, rollout_logprobs=())
                    assert ours.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=1e-4)
                    assert ours.policy_version == version
        assert real.metrics() == {"servers": 2, "retries": 0, "moved": 0}
        # The same servers, which get their weights over the network now.
        linked = VLLMServers(
            tiny_dir, tiny_end_tokens, 256, "", urls=[s.url for s in real._pool.servers], transfer="network"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        restore(inside, model, 9)
        restore(linked, model, 9)
        expected = generate(inside, prompts, range(len(prompts)), samplings[1])
        for ours, theirs in zip(generate(linked, prompts, range(len(prompts)), samplings[1]), expected, strict=True):
            assert replace(ours, rollout_logprobs=()) == replace(theirs, rollout_logprobs=())
            assert ours.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=1e-4)
        linked.close()
        restore(real, model, 7)
        # Weights that come while completions are under way: none is lost, each has the version of its first token. What a
        # server had not begun yet has the new one.
        prompts[0] = replace(prompts[0], sampling={"max_tokens": 2})
        coming = real.generate(prompts, range(len(prompts)), Sampling(max_tokens=120))
        first = next(coming)
        restore(real, model, 8)
        late = dict([first, *coming])
        assert sorted(late) == list(range(len(prompts)))
        assert first[1].policy_version == 7
        assert {completion.policy_version for completion in late.values()} <= {7, 8}
        (after,) = generate(real, prompts[:1], [0], samplings[0])
        assert after.policy_version == 8
    finally:
        inside.close()


def kill(server: Server) -> None:
    """The server and what it started."""
    os.killpg(server.process._process.pid, signal.SIGKILL)


class KillingProxy(FakeServer):
    """Stands in front of a server, which it kills when the `killed_at`-th completion is asked for."""

    def __init__(self, server: Server, killed_at: int) -> None:
        super().__init__()
        self._server, self._left = server, killed_at

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    async def _forward(self, request: web.Request) -> web.Response:
        self._left -= request.path == "/inference/v1/generate"
        if self._left == 0:
            kill(self._server)
        url, body = f"{self._server.url}{request.path_qs}", await request.read()
        async with aiohttp.request(
            request.method, url, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)


@pytest.mark.slow
@pytest.mark.timeout(600)  # vLLM imports itself six times
def test_a_run_goes_on_without_a_killed_server_and_ends_without_any(real: VLLMServers, tmp_path: Path) -> None:
    first, second = real._pool.servers
    run = tmp_path / "run"
    settings = [*TINY, "rollout=vllm_server", "rollout.max_tokens=100", "+rollout.engine.retries=2", "tracking=none"]
    settings += ["steps=100", "prompts_per_step=8", "checkpoint.every=2", "evaluation.at_end=false", f"run_dir={run}"]
    # Each server has 16 of a step's 32 completions, after one that the run tries it with.
    with KillingProxy(first, killed_at=1 + 2 * 16 + 8) as proxy:
        process = start(tmp_path, *settings, f"rollout.engine.urls=[{proxy.url},{second.url}]")
        wait_for_steps(run, 5, process)
        kill(second)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 1, err
    (line,) = (line for line in err.splitlines() if "no rollout server is left" in line)
    assert proxy.url in line
    assert second.url in line

    done = rows(run)
    assert [row["rollout/servers"] for row in done] == [2, 2] + [1] * (len(done) - 2)
    assert [row["step"] for row in done if row["rollout/moved"]] == [3]
    assert done[2]["rollout/moved"] >= 8
    assert done[2]["rollout/retries"] > 0
    assert max(row["rollout/logprob_diff_max"] for row in done) < 1e-3
    files = sorted((run / "completions").glob("step-*.parquet"))
    sampled = [row for file in files for row in pq.read_table(file).to_pylist()]
    places = [(row["step"], row["group_id"], row["sample_index"]) for row in sampled]
    groups = {(row["step"], row["group_id"]) for row in sampled}
    assert len(places) == len(set(places)) == len(done) * 32  # none lost, none twice
    assert len(groups) == len(done) * 8
    assert all(row["policy_version"] == row["step"] - 1 for row in sampled)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], "no rollout server is left" in status["error"]) == ("failed", True)
    last = max((run / "checkpoints").iterdir())
    assert last.name == f"step-{len(done) // 2 * 2:06d}"
    assert weights(run, len(done) // 2 * 2)
