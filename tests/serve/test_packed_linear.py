from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from offramp.serve.model import linear
from offramp.serve.model.linear import PackedLinear, can_pack

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    """What was found out about packing under a patch must not outlive the test."""
    yield
    can_pack.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (32, 300), (576, 960)])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, inputs: int, outputs: int, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # bf16 sums in fp32 and rounds the result once.
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    for layer in (PackedLinear(weight, bias, kernels="packed"), PackedLinear(weight, bias, kernels="plain")):
        y = layer(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_private_operators_the_plain_layout_is_used(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def missing(*args: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear, "_pack", missing)
    can_pack.cache_clear()
    layer = PackedLinear(torch.eye(4, dtype=dtype), kernels="packed")
    assert layer.kernels == "plain"
    assert torch.equal(layer(torch.ones(2, 4, dtype=dtype)), torch.ones(2, 4, dtype=dtype))


def test_operators_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_packed_linear", lambda x, weight, bias: x.new_zeros(3, 24))
    can_pack.cache_clear()
    assert not can_pack(torch.float32)
