"""The matrix kernels in C++ beside torch's, at every ISA level of this CPU: equal numbers, every row's bits its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.native import loaded
from offramp.serve.model.native import NativeLibrary, supported_isa_levels

pytestmark = pytest.mark.usefixtures("_restore_threads")

DTYPES = [torch.float32, torch.bfloat16]
# (inputs, outputs): one of each, less than a vector, more than one panel, whole tiles, and nothing that fits.
SIZES = [(1, 1), (7, 5), (33, 70), (64, 96), (131, 197)]
ROWS = [*range(1, 41), 100]


@pytest.fixture(params=supported_isa_levels())
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    return loaded(request.param)


@pytest.fixture
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """A map with everything that can be asked of it, natively, by torch and in float64."""

    def __init__(self, ops: Any, dtype: torch.dtype, inputs: int, outputs: int, *, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(inputs * 1000 + outputs)
        self.x = torch.randn(max(ROWS), inputs, generator=generator).to(dtype)
        self.weight, self.gated_weight = (  # such that sums are of size 1
            (torch.randn(size, inputs, generator=generator) / inputs**0.5).to(dtype) for size in (outputs, 2 * outputs)
        )
        self.bias = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        self.gated_bias = torch.randn(2 * outputs, generator=generator).to(dtype) if bias else None
        self.outputs = outputs
        self._ops = ops
        self._packed, self._gated = ops.pack_linear(self.weight), ops.pack_linear(self.gated_weight, gated=True)
        self._packed_bias = None if self.bias is None else ops.pack_bias(self.bias)
        self._packed_gated_bias = None if self.gated_bias is None else ops.pack_bias(self.gated_bias, gated=True)

    def linear(self, rows: Tensor) -> Tensor:
        return self._ops.linear(self.x[rows], self._packed, self._packed_bias, self.outputs)

    def linear_fp32(self, rows: Tensor) -> Tensor:
        return self._ops.linear(self.x[rows], self._packed, self._packed_bias, self.outputs, keep_fp32=True)

    def gated_linear(self, rows: Tensor) -> Tensor:
        return self._ops.gated_linear(self.x[rows], self._gated, self._packed_gated_bias, self.outputs)

    def head(self, rows: Tensor) -> Tensor:
        return torch.stack([part.double() for part in self._ops.head(self.x[rows], self._packed, self.outputs)])

    def torchs(self, name: str, dtype: torch.dtype) -> Tensor:
        """What torch makes of all rows in `dtype`."""

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        x, weight, gated = self.x.to(dtype), self.weight.to(dtype), self.gated_weight.to(dtype)
        if name == "gated_linear":
            gate, up = F.linear(x, gated, cast(self.gated_bias)).chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.linear(x, weight, cast(self.bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "linear_fp32", "gated_linear"])
def test_a_map_computes_what_torch_does(native: NativeLibrary, name: str, dtype: torch.dtype) -> None:
    for (inputs, outputs), bias in itertools.product(SIZES, (True, False)):
        case = Case(native.ops, dtype, inputs, outputs, bias=bias)
        exact = case.torchs(name, torch.float64)
        torchs = case.torchs(name, dtype)
        for rows in ROWS if bias else (1, 100):
            y = getattr(case, name)(torch.arange(rows))
            assert y.shape == (rows, outputs)
            if dtype == torch.float32 or name == "linear_fp32":
                assert y.dtype == torch.float32
                torch.testing.assert_close(y.double(), exact[:rows], rtol=1e-4, atol=1e-4)
            else:
                assert y.dtype == dtype
                # Roundings of 2^-9 each, one of them before a gate that makes more of it.
                torch.testing.assert_close(y.double(), exact[:rows], rtol=2**-5, atol=2**-7)
        if dtype == torch.bfloat16 and name != "linear_fp32":
            error = (getattr(case, name)(torch.arange(max(ROWS))).double() - exact).abs().mean()
            assert error <= 1.02 * (torchs.double() - exact).abs().mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "linear_fp32", "gated_linear", "head"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_the_other_rows(
    native: NativeLibrary, name: str, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in [(131, 197), (320, 1030)]:
        case = Case(native.ops, dtype, inputs, outputs)
        run: Callable[[Tensor], Tensor] = getattr(case, name)
        row_axis = 1 if name == "head" else 0
        torch.set_num_threads(1)
        alone = torch.cat([run(torch.tensor([row])) for row in range(max(ROWS))], dim=row_axis)
        torch.set_num_threads(threads)
        for size in (1, 2, 3, 5, 8, 13, 14, 17, 32, 33, 64, 100):
            rows = torch.randperm(max(ROWS), generator=generator)[:size]
            assert torch.equal(run(rows), alone.index_select(row_axis, rows)), size


def test_row_blocks_of_a_long_prompt_do_not_show(native: NativeLibrary) -> None:
    weight, x = torch.randn(40, 2048), torch.randn(300, 2048)  # 2.4 MB of rows: several blocks at every level
    packed = native.ops.pack_linear(weight)
    whole = native.ops.linear(x, packed, None, 40)
    torch.testing.assert_close(whole, F.linear(x, weight), rtol=1e-4, atol=1e-3)
    assert torch.equal(whole[123:130], native.ops.linear(x[123:130], packed, None, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(native: NativeLibrary, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(9, 70).to(dtype), torch.randn(20, 33).to(dtype)
    packed = native.ops.pack_linear(weight)
    assert torch.equal(
        native.ops.linear(wide[:, 5:38], packed, None, 20),
        native.ops.linear(wide[:, 5:38].contiguous(), packed, None, 20),
    )


def test_no_rows_give_no_rows(native: NativeLibrary) -> None:
    packed = native.ops.pack_linear(torch.randn(20, 33))
    x = torch.empty(0, 33)
    assert native.ops.linear(x, packed, None, 20).shape == (0, 20)
    assert [part.shape for part in native.ops.head(x, packed, 20)] == [(0,)] * 4
    assert native.ops.rms_norm(x, None, 1e-5).shape == (0, 33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 37, 576])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_torchs(native: NativeLibrary, dtype: torch.dtype, size: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (3 * torch.randn(50, size, generator=generator)).to(dtype)
    weight = torch.rand(size, generator=generator).to(dtype) if weighted else None
    y, expected = native.ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5)
    # Both round once; sums in another order may move a value to the next bf16, in rare cases.
    torch.testing.assert_close(y, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (y != expected).float().mean() < (0.01 if dtype == torch.bfloat16 else 1.0)
    assert torch.equal(y[7:8], native.ops.rms_norm(x[7:8], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 31, 512, 1540])
def test_a_head_gives_what_its_logits_say(native: NativeLibrary, dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weight = torch.randn(vocabulary, 37, generator=generator).to(dtype)
    x = torch.randn(40, 37, generator=generator).to(dtype)
    packed = native.ops.pack_linear(weight)
    logits = native.ops.linear(x, packed, None, vocabulary, keep_fp32=True)
    token_ids, best, second, logsumexp = native.ops.head(x, packed, vocabulary)
    values = logits.topk(2, dim=-1).values
    assert torch.equal(token_ids, logits.argmax(dim=-1))
    assert torch.equal(torch.stack((best, second), dim=1), values)
    torch.testing.assert_close(logsumexp, logits.double().logsumexp(dim=-1).float(), rtol=1e-6, atol=2e-6)


def test_a_head_takes_the_lowest_of_equal_tokens(native: NativeLibrary) -> None:
    weight = torch.zeros(1200, 8)
    weight[[5, 700, 1199]] = 1.0  # in three blocks
    weight[[900, 17, 16], 0] = 9.0  # in two, and neighbours in one
    x = torch.eye(8)[:2]
    token_ids, best, second, _ = native.ops.head(x, native.ops.pack_linear(weight), 1200)
    assert token_ids.tolist() == [16, 5]
    assert best.tolist() == second.tolist() == [9.0, 1.0]


def test_a_vocabulary_of_one_has_no_second(native: NativeLibrary) -> None:
    _, best, second, logsumexp = native.ops.head(torch.ones(1, 3), native.ops.pack_linear(torch.ones(1, 3)), 1)
    assert (best.item(), second.item(), logsumexp.item()) == (3.0, float("-inf"), 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_shows_nan_in_the_row_that_has_it(native: NativeLibrary, dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 37).to(dtype), torch.randn(1540, 37).to(dtype)
    expected = torch.zeros(20, dtype=torch.bool)
    x[3, 36] = float("nan")
    expected[3] = True
    _, best, _, logsumexp = native.ops.head(x, native.ops.pack_linear(weight), 1540)
    assert torch.equal(best.isnan(), expected)
    assert torch.equal(logsumexp.isnan(), expected)
    weight[1539] = float("nan")  # one token's logits, in the last block
    assert native.ops.head(x, native.ops.pack_linear(weight), 1540)[1].isnan().all()


def test_a_head_of_infinite_logits_says_so(native: NativeLibrary) -> None:
    weight = torch.tensor([[1.0], [float("inf")], [2.0]])
    token_ids, best, second, logsumexp = native.ops.head(torch.ones(1, 1), native.ops.pack_linear(weight), 3)
    assert (token_ids.item(), best.item(), second.item(), logsumexp.item()) == (1, float("inf"), 2.0, float("inf"))


def test_tokens_that_hardly_count_do_not_disturb_the_sum(native: NativeLibrary) -> None:
    # e^-90 and less is subnormal or nothing; what is left out must not show.
    weight = torch.cat((torch.zeros(1), torch.linspace(-200.0, -80.0, 600)))[:, None]
    _, _, _, logsumexp = native.ops.head(torch.ones(1, 1), native.ops.pack_linear(weight), 601)
    assert logsumexp.item() == 0.0
    rest = native.ops.head(torch.ones(1, 1), native.ops.pack_linear(weight[1:].contiguous()), 600)[3]
    torch.testing.assert_close(rest.double(), weight[1:, 0].double().logsumexp(0)[None], rtol=1e-6, atol=0.0)


def test_infinite_and_tiny_values_pass_through_the_gate(native: NativeLibrary) -> None:
    gates = torch.tensor([[-1e4], [-100.0], [-88.0], [0.0], [88.0], [1e4], [float("inf")], [float("nan")]])
    weight = torch.ones(2, 1)
    y = native.ops.gated_linear(gates, native.ops.pack_linear(weight, gated=True), None, 1)
    torch.testing.assert_close(y, F.silu(gates) * gates, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_what_does_not_fit_is_refused(native: NativeLibrary) -> None:
    ops = native.ops
    packed, bias = ops.pack_linear(torch.randn(20, 33)), ops.pack_bias(torch.randn(20))
    x = torch.randn(4, 33)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.pack_linear(torch.randn(20, 33, dtype=torch.float64)), "Double"),
        (lambda: ops.pack_linear(torch.randn(20)), "matrix"),
        (lambda: ops.pack_linear(torch.randn(20, 33).t()), "contiguous"),
        (lambda: ops.pack_linear(torch.randn(21, 33), gated=True), "21 rows"),
        (lambda: ops.linear(x.bfloat16(), packed, None, 20), "one type"),
        (lambda: ops.linear(torch.randn(4, 34), packed, None, 20), "34 features"),
        (lambda: ops.linear(torch.randn(33, 4).t(), packed, None, 20), "contiguous"),
        (lambda: ops.linear(x[0], packed, None, 20), "two axes"),
        (lambda: ops.linear(x, packed, None, 200), "out_features 200"),
        (lambda: ops.linear(x, packed, None, 0), "out_features 0"),
        (lambda: ops.linear(x, torch.randn(20, 33), None, 20), "pack_linear"),
        (lambda: ops.linear(x, packed, torch.randn(20), 20), "pack_bias"),
        (lambda: ops.linear(x, packed, bias.bfloat16(), 20), "one type"),
        (lambda: ops.gated_linear(x, packed, None, 20), "out_features|panels"),
        (lambda: ops.rms_norm(x, torch.ones(32), 1e-5), "33 features"),
    ]
    for call, message in refused:
        if native.isa == "portable" and "panels" in message:
            continue  # 20 columns and 20 features happen to be as many panels there
        with pytest.raises(RuntimeError, match=message):
            call()
