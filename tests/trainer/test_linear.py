import copy

import pytest
import torch
from torch import nn

from rlpost.trainer.linear import OneDNNLinear, use_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7, 12), (5, 12), (1, 0, 12)])
def test_equal_to_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain = nn.Linear(12, 9, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert type(fast) is OneDNNLinear
    inputs = [torch.randn(shape).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    weights = torch.randn(*shape[:-1], 9)
    outputs = [layer(x) for layer, x in zip((plain, fast), inputs, strict=True)]
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-5)


def test_other_precisions_go_the_plain_way() -> None:
    layer = nn.Linear(4, 3).double()
    use_onednn(layer)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_subclasses_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2))
    use_onednn(model)
    assert [type(layer).__name__ for layer in model] == ["OneDNNLinear", "Own"]
