"""Exit heads and exit tests in C++ beside the model's own modules, at every ISA level of this CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from benchmarks.live_bytes import LiveBytes

from helpers.native import loaded
from helpers.tiny import tiny_model
from offramp.common.exits import confidence
from offramp.common.exits.config import ExitConfig
from offramp.common.model.exit_head import ExitHead
from offramp.serve.model import exit_transform, linear
from offramp.serve.model.exit_transform import ExitTransform
from offramp.serve.model.linear import NativeMap, PackedLinear
from offramp.serve.model.native import NativeLibrary, supported_isa_levels
from offramp.serve.model.unembedding import Unembedding

EPS = 1e-5
HEADS = [
    ExitConfig((1,), "bare"),
    ExitConfig((1,), "norm"),
    ExitConfig((1,), "adapter"),
    ExitConfig((1,), "adapter", adapter_dim=5),
    ExitConfig((1,), "mlp"),
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=supported_isa_levels())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeLibrary]:
    library = loaded(request.param)
    for module in (exit_transform, linear):
        monkeypatch.setattr(module, "native_library", lambda: library)
    before = torch.get_num_threads()
    yield library
    torch.set_num_threads(before)


def make_head(config: ExitConfig, dtype: torch.dtype) -> tuple[ExitHead, int]:
    """A head whose every weight counts, and the size of its states."""
    model = tiny_model(replace(config, layers=(1,)), hidden_size=36)
    head = model.exits["1"]
    assert isinstance(head, ExitHead)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return head.to(dtype), model.config.hidden_size


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("config", HEADS, ids=lambda config: f"{config.head}-{config.adapter_dim}")
def test_a_head_and_its_test_are_what_the_modules_say(config: ExitConfig, dtype: torch.dtype) -> None:
    head, size = make_head(config, dtype)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, size, generator=generator).to(dtype)
    weight = torch.randn(1100, size, generator=generator).to(dtype)
    transform, linear = ExitTransform(head, head.norm, EPS, "native"), PackedLinear(weight, kernels="native")
    expected = head.double().transform(x.double())
    state = transform(x)
    torch.testing.assert_close(state.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    logits = (state.double() @ weight.double().T).float()
    for measure in ("max_probability", "margin"):
        exact = confidence.confidence(measure, logits, x, x)
        for unembed in (Unembedding(linear), Unembedding(linear, 3 * torch.arange(1100), 3300)):
            seen, best, values = transform.test(x, unembed, measure)
            assert torch.equal(seen, state)
            torch.testing.assert_close(values, exact, atol=1e-4, rtol=1e-4)
            for ours, alone in zip(vars(best).values(), vars(unembed.head(state)).values(), strict=True):
                assert torch.equal(ours, alone)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [5, 33, 200])
@pytest.mark.parametrize("int8", [False, True])
def test_an_adapter_is_a_gate_of_ones_bit_for_bit_and_half_its_size(
    native: NativeLibrary, width: int, dtype: torch.dtype, int8: bool
) -> None:
    head, size = make_head(ExitConfig((1,), "adapter", adapter_dim=width), dtype)
    assert head.adapter is not None
    assert head.adapter.down_proj is not None
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, size, generator=generator).to(dtype)
    int8_for = dtype if int8 else None
    with LiveBytes() as alive:
        transform = ExitTransform(head, head.norm, EPS, "native", int8_for=int8_for)
        gc.collect()
        packed_bytes = alive.now
        down = head.adapter.down_proj.weight.detach()
        ups = torch.cat((x.new_zeros(width), x.new_ones(width)))
        gated = NativeMap.pack(
            native.ops, torch.cat((down, torch.zeros_like(down))), ups, gated=True, int8_for=int8_for
        )
        proj = NativeMap.pack(native.ops, head.adapter.proj.weight.detach(), None, int8_for=int8_for)
    whole_panels = 2 * 2 * 16 * size * dtype.itemsize  # what padding may add to both maps
    assert packed_bytes <= proj.weight.nbytes + gated.weight.nbytes * 0.6 + whole_panels
    assert head.norm is not None
    gate_of_ones = native.ops.exit_state(
        x, head.adapter.norm.weight.detach(), *gated, width, True, *proj, True, head.norm.weight.detach(), EPS
    )
    assert torch.equal(transform(x), gate_of_ones)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("vocabulary", [33, 1300, 9000])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, vocabulary: int) -> None:
    head, size = make_head(ExitConfig((1,), "adapter", adapter_dim=5), dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(100, size, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, size, generator=generator).to(dtype)
    unembed = Unembedding(PackedLinear(weight, kernels="native"))
    transform = ExitTransform(head, head.norm, EPS, "native")
    torch.set_num_threads(1)
    alone = [transform.test(x[i : i + 1], unembed, "margin") for i in range(len(x))]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (torch.arange(100), torch.tensor([7, 3, 99]), torch.arange(40, 57)):
            state, best, values = transform.test(x[rows], unembed, "margin")
            assert torch.equal(state, torch.cat([alone[i][0] for i in rows.tolist()]))
            assert torch.equal(values, torch.cat([alone[i][2] for i in rows.tolist()]))
            assert torch.equal(best.token_ids, torch.cat([alone[i][1].token_ids for i in rows.tolist()]))
            assert torch.equal(transform(x[rows]), state)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cosine(native: NativeLibrary, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    for size in (1, 36, 575):
        x, y = (torch.randn(20, size, generator=generator).to(dtype) for _ in range(2))
        x[0] = 0
        y[1] = x[1]
        torch.testing.assert_close(native.ops.cosine(x, y), confidence.cosine(x, y), atol=1e-6, rtol=1e-6)
        assert torch.equal(native.ops.cosine(x, y)[5:8], native.ops.cosine(x[5:8], y[5:8]))
        assert float(native.ops.cosine(x, x).max()) <= 1
        x[2] = float("nan")
        assert native.ops.cosine(x, y).isnan().tolist() == [row == 2 for row in range(20)]


def test_arguments_that_do_not_fit_are_refused(native: NativeLibrary) -> None:
    x, packed = torch.randn(3, 36), native.ops.pack_linear(torch.randn(50, 40))
    none = (None, None, None, None, 0, False, None, None, None, False, None, EPS)
    with pytest.raises(RuntimeError, match="40 features"):
        native.ops.exit_test(x, *none, packed, None, 50, None, True)
    with pytest.raises(RuntimeError, match="each of the 40 logits"):
        native.ops.exit_test(x, *none, native.ops.pack_linear(torch.randn(40, 36)), None, 40, torch.arange(39), True)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        native.ops.exit_state(torch.randn(36, 3).T, *none)
    with pytest.raises(RuntimeError, match="a norm before it"):
        native.ops.exit_state(x, None, None, None, None, 0, False, packed, None, None, False, None, EPS)
    with pytest.raises(RuntimeError, match="must agree"):
        native.ops.cosine(x, x[:2])
