"""Cross-entropy without logits equals cross-entropy with them, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offramp.train.linear_cross_entropy import CHUNK_ROWS, linear_cross_entropy


def case(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(0, 50, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, CHUNK_ROWS, 2 * CHUNK_ROWS + 3])
def test_equals_the_loss_of_whole_logits(rows: int) -> None:
    x, weight, labels = case(rows, torch.float64)
    logits = x @ weight.T
    expected = 0.7 * F.cross_entropy(logits, labels, reduction="sum")
    wanted = torch.autograd.grad(expected, (x, weight))
    loss, predicted = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(0.7 * loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(0.7 * loss, (x, weight)), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(predicted, logits.argmax(-1))


def test_a_frozen_weight_gets_no_gradient_and_none_is_made_without_graph() -> None:
    x, weight, labels = case(5, torch.float32)
    weight = weight.detach()
    loss, _ = linear_cross_entropy(x, weight, labels)
    loss.backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels)[0].requires_grad


def test_no_tokens_cost_nothing() -> None:
    x, weight, _ = case(1, torch.float32)
    loss, predicted = linear_cross_entropy(x[:0], weight, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == len(predicted) == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_autocast_decides_the_type_of_the_products_and_gradients_keep_that_of_the_leaves() -> None:
    x, weight, labels = case(100, torch.float32)
    wanted = torch.autograd.grad(F.cross_entropy(x @ weight.T, labels, reduction="sum"), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(x, weight, labels)
    assert loss.dtype == torch.float32
    for got, exact in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
        assert got.dtype == torch.float32
        assert 0 < float((got - exact).norm() / exact.norm()) < 0.02
