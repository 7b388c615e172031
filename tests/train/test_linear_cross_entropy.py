"""Cross-entropy without logits equals cross-entropy with them, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offramp.train.linear_confidence import linear_max_probability
from offramp.train.linear_cross_entropy import CHUNK_ROWS, Teacher, TokenLoss, linear_cross_entropy


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
    sums = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(0.7 * sums.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(0.7 * sums.loss, (x, weight)), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(sums.predicted, logits.argmax(-1))
    assert int(sums.correct) == int((sums.predicted == labels).sum())
    assert float(sums.target) == float(sums.cross_entropy) == float(sums.loss.detach())
    assert float(sums.divergence) == 0.0


KINDS = {
    "temperature": TokenLoss(temperature=1.7),
    "smoothing": TokenLoss(smoothing=0.2),
    "by confidence": TokenLoss(by_confidence=True),
    "all": TokenLoss(temperature=0.6, smoothing=0.1, by_confidence=True),
}


@pytest.mark.parametrize("teacher", [None, "all tokens", "some tokens"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_loss_equals_the_formula_on_whole_logits(name: str, teacher: str | None) -> None:
    kind = KINDS[name]
    x, weight, labels = case(CHUNK_ROWS + 9, torch.float64)
    rows = torch.arange(len(x))
    logits = x @ weight.T
    log_p = (logits / kind.temperature).log_softmax(-1)
    losses = (1 - kind.smoothing) * -log_p[rows, labels] + kind.smoothing * -log_p.mean(-1)
    if kind.by_confidence:
        losses = losses * logits.softmax(-1).amax(-1).detach()
    expected = 0.4 * losses.sum()
    lesson = None
    if teacher is not None:
        known = None if teacher == "all tokens" else rows % 3 > 0
        state, other, _ = case(len(x) + 1, torch.float64)
        lesson = Teacher(state[: len(x)].detach(), other.detach(), known, temperature=2.0, scale=0.6)
        p = (lesson.state @ lesson.weight.T / 2.0).softmax(-1)
        student = (logits / kind.temperature / 2.0).log_softmax(-1)
        divergences = 4.0 * F.kl_div(student, p, reduction="none").sum(-1)
        expected = expected + 0.6 * (divergences if known is None else divergences[known]).sum()
    sums = linear_cross_entropy(x, weight, labels, kind, lesson, scale=0.4)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(3.0 * expected, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(3.0 * sums.loss, (x, weight)), wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sums.target, losses.detach().sum(), rtol=1e-12, atol=0)
    plain = F.cross_entropy(logits, labels, reduction="sum").detach()
    torch.testing.assert_close(sums.cross_entropy, plain, rtol=1e-12, atol=0)


def test_the_largest_probability_has_the_gradient_of_whole_logits() -> None:
    x, weight, _ = case(CHUNK_ROWS + 3, torch.float64)
    expected = (x @ weight.T).softmax(-1).amax(-1)
    factors = torch.linspace(-1.0, 2.0, len(x), dtype=torch.float64)
    wanted = torch.autograd.grad(expected @ factors, (x, weight))
    got = linear_max_probability(x, weight)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(got @ factors, (x, weight)), wanted, rtol=1e-12, atol=1e-12)
    small, head, _ = case(3, torch.float64)
    assert torch.autograd.gradcheck(linear_max_probability, (small, head))


def test_gradients_of_the_loss_by_differences() -> None:
    x, weight, labels = case(3, torch.float64)
    kind = TokenLoss(temperature=1.5, smoothing=0.1)
    lesson = Teacher(x.detach().flip(0), weight.detach().clone(), torch.tensor([True, False, True]), 3.0, 0.5)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, labels, kind, lesson, 0.5).loss, (x, weight)
    )


def test_a_frozen_weight_gets_no_gradient_and_none_is_made_without_graph() -> None:
    x, weight, labels = case(5, torch.float32)
    weight = weight.detach()
    linear_cross_entropy(x, weight, labels).loss.backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels).loss.requires_grad


def test_no_tokens_cost_nothing() -> None:
    x, weight, _ = case(1, torch.float32)
    sums = linear_cross_entropy(x[:0], weight, torch.empty(0, dtype=torch.int64))
    sums.loss.backward()
    assert float(sums.loss.detach()) == int(sums.correct) == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_autocast_decides_the_type_of_the_products_and_gradients_keep_that_of_the_leaves() -> None:
    x, weight, labels = case(100, torch.float32)
    wanted = torch.autograd.grad(F.cross_entropy(x @ weight.T, labels, reduction="sum"), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels).loss
    assert loss.dtype == torch.float32
    for got, exact in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
        assert got.dtype == torch.float32
        assert 0 < float((got - exact).norm() / exact.norm()) < 0.02
