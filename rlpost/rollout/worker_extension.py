"""What runs inside a vLLM server's workers: `--worker-extension-cls rlpost.rollout.worker_extension.PolicyWeights`."""

from safetensors import safe_open
from torch import nn


class PolicyWeights:
    """Methods that vLLM adds to its worker, for POST /collective_rpc."""

    def load_policy(self, path: str = "") -> None:
        """Take over the weights of a safetensors file; without one, those the server was started with."""
        if path:
            with safe_open(path, framework="pt") as weights:
                self.reload_weights(weights_iterator=((name, weights.get_tensor(name)) for name in weights.keys()))  # noqa: SIM118
        else:
            self.reload_weights()
        refresh_head(self.model_runner.get_model())


def refresh_head(model: nn.Module) -> None:
    """On CPUs the head multiplies by a repacked copy of its weight, which reloading a tied embedding leaves stale."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
