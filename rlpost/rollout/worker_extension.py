"""The extension of a vLLM server's workers: `--worker-extension-cls rlpost.rollout.worker_extension.PolicyWeights`."""

from collections.abc import Iterable

from safetensors import safe_open
from torch import Tensor, nn

from rlpost.distributed import Link

LINK_S = 60.0


class PolicyWeights:
    """Methods that vLLM adds to its worker, for POST /collective_rpc."""

    def load_policy(self, path: str = "") -> None:
        """Take over the weights of a safetensors file; without one, those the server was started with."""
        if path:
            with safe_open(path, framework="pt") as weights:
                self._take_over((name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118
        else:
            self._take_over(None)

    def join_link(self, address: str, port: int, place: int, size: int) -> None:
        """Args: place: the rank of this server's first worker."""
        self._policy_link = Link(address, port, place + self.rank, size, LINK_S)  # pyright: ignore[reportAttributeAccessIssue] - it is the worker's

    def receive_policy(self) -> None:
        """Weights from the trainer, to keep: a transfer that breaks off leaves the model as it is."""
        self._policy: list[tuple[str, Tensor]] = []  # those of an earlier one make room
        try:
            self._policy = list(self._policy_link.receive())
        except RuntimeError:
            self._policy_link.close()
            raise

    def load_received(self) -> None:
        """Take over the weights that were received last; asked again, they are there already."""
        if self._policy:
            self._take_over(self._policy)
            self._policy = []

    def _take_over(self, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        self.reload_weights(weights_iterator=None if weights is None else iter(weights))  # pyright: ignore[reportAttributeAccessIssue] - it is the worker's
        refresh_head(self.model_runner.get_model())  # pyright: ignore[reportAttributeAccessIssue] - it is the worker's


def refresh_head(model: nn.Module) -> None:
    """The head multiplies, on CPUs, by a repacked copy of its weight, which reloading a tied embedding leaves stale."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
