"""Layers in C++ beside torch's: the same numbers, and every row's bits its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import packed
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import RowContext, Rows

pytestmark = pytest.mark.usefixtures("_restore_threads")

NUM_BLOCKS = 256
# Everything the Llama family varies, and sizes that fit no vector.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "mistral-wide-window": {"model_type": "mistral", "sliding_window": 40},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "group-1": {"num_key_value_heads": 4, "head_dim": 64},
    "group-3": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    "group-4": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 80},
    "group-8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
    "group-40": {"num_attention_heads": 40, "num_key_value_heads": 1, "head_dim": 8},
    "group-2-wide": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "odd-sizes": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "hidden_size": 37,
        "intermediate_size": 51,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
LENGTHS = (1, 5, 30, 47)


@pytest.fixture
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Side:
    """One model with a cache of NaN, run on whatever rows of the given states."""

    def __init__(
        self, model: MultiExitTransformer, kernels: Any, states: Sequence[Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.packed, self.states = PackedModel(model, dtype, kernels), states
        config = model.config
        # Blocks that hold whole groups of keys can be read as they lie, others have to be gathered: both are run.
        self.block_size = 16 if config.head_dim == 64 else 4
        self.context: RowContext = self.packed.row_context(256, self.block_size)
        self.cache = KVStorage(
            self.packed.num_cache_layers,
            NUM_BLOCKS,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            poison=True,
        )
        # Blocks of a sequence lie anywhere, in no order.
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1), dtype=torch.int64)
        width = NUM_BLOCKS // len(states)
        self.tables = blocks[: width * len(states)].view(len(states), width).int()

    def rows(self, spans: Sequence[tuple[int, int, int]]) -> Rows:
        """Rows of (sequence, first position, after the last position)."""
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        sequences = torch.cat([torch.full((stop - start,), sequence) for sequence, start, stop in spans])
        size = self.block_size
        slots = self.tables[sequences, positions // size].long() * size + positions % size
        return Rows(positions, slots, sequences.int(), self.tables, self.context)

    def run(self, spans: Sequence[tuple[int, int, int]], bounds: Sequence[int] = (0, 3, 4)) -> list[Tensor]:
        """States and previous states after each range of layers between `bounds`."""
        rows = self.rows(spans)
        x = torch.cat([self.states[sequence][start:stop] for sequence, start, stop in spans])
        seen: list[Tensor] = []
        for start, stop in pairwise(bounds):
            before = x.clone()
            y, previous = self.packed.run_layers(x, rows, self.cache, start, stop)
            assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), "the states given were changed"
            x = y
            seen += [y, previous]
        return seen


def draw_states(lengths: Sequence[int], size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator).to(dtype) for length in lengths]


def in_three_parts(lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Prompts in two chunks of uneven length, then the last token of each sequence: all in one batch each."""
    parts: list[list[tuple[int, int, int]]] = [[], [], []]
    for sequence, length in enumerate(lengths):
        cuts = (0, length // 3, length - 1, length)
        for part, (start, stop) in zip(parts, pairwise(cuts), strict=True):
            if start < stop:
                part.append((sequence, start, stop))
    return parts


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_states_and_cache_are_those_of_plain_torch(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    states = draw_states(LENGTHS, model.config.hidden_size)
    native, plain = (Side(model, kernels, states) for kernels in ("native", "plain"))
    for part in in_three_parts(LENGTHS):
        for ours, theirs in zip(native.run(part), plain.run(part), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    # NaN where nothing belongs, on both sides.
    torch.testing.assert_close(native.cache.data, plain.cache.data, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert int(native.cache.data[0, :, 0].isfinite().sum()) == sum(LENGTHS)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_bf16_is_no_farther_from_fp32_than_torchs(name: str) -> None:
    distances = {"native": 0.0, "plain": 0.0}
    for seed in range(3):
        model = tiny_model(seed=seed, **VARIANTS[name])
        states = draw_states(LENGTHS, model.config.hidden_size, torch.bfloat16, seed)
        exact = Side(model, "plain", [x.float() for x in states])
        expected = [exact.run(part)[2] for part in in_three_parts(LENGTHS)]
        for kernels in ("native", "plain"):
            side = Side(model, kernels, states, torch.bfloat16)
            for part, there in zip(in_three_parts(LENGTHS), expected, strict=True):
                distances[kernels] += float((side.run(part)[2].float() - there).abs().mean())
    assert distances["plain"] > 0
    # Matrix tiles round the weights of attention to bf16, as torch does only in some of its kernels.
    assert distances["native"] <= 1.15 * distances["plain"], distances


def alone(side: Side) -> list[Tensor]:
    """Final states of all sequences, each row run by itself, by one thread."""
    torch.set_num_threads(1)
    return [
        torch.cat([side.run([(sequence, position, position + 1)], (0, 2))[0] for position in range(len(states))])
        for sequence, states in enumerate(side.states)
    ]


def mixed(side: Side, seed: int) -> list[Tensor]:
    """The same, in random batches of random chunks; most of them go through both layers in two calls."""
    rng = random.Random(seed)
    done = [0] * len(side.states)
    results: list[list[Tensor]] = [[] for _ in side.states]
    while any(count < len(states) for count, states in zip(done, side.states, strict=True)):
        spans = []
        for sequence in rng.sample(range(len(side.states)), rng.randint(1, len(side.states))):
            left = len(side.states[sequence]) - done[sequence]
            if left:
                count = rng.choice((1, 1, 2, 3, 13, left))
                spans.append((sequence, done[sequence], done[sequence] + min(count, left)))
        if not spans:
            continue
        rows = side.run(spans, rng.choice(((0, 2), (0, 1, 2))))[-2]
        for sequence, start, stop in spans:
            results[sequence].append(rows[: stop - start])
            rows = rows[stop - start :]
            done[sequence] = stop
    return [torch.cat(parts) for parts in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral-window", "mistral-wide-window", "qwen3", "group-1", "group-3", "group-4", "group-8"),
        *("group-40", "group-2-wide", "odd-sizes"),
    ],
)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_its_company(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=2, **VARIANTS[name])
    # Beyond the first block of keys of the attention, and on both sides of what a tile of rows or queries holds.
    states = draw_states((1, 3, 40, 150), model.config.hidden_size, dtype)
    single = Side(model, "native", states, dtype)
    expected = alone(single)
    for seed, threads in enumerate((1, 2, 3)):
        torch.set_num_threads(threads)
        side = Side(model, "native", states, dtype)
        for ours, theirs in zip(mixed(side, seed), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(side.cache.data.nan_to_num(7.0), single.cache.data.nan_to_num(7.0))
    whole = Side(model, "native", states, dtype)
    parts = whole.run([(sequence, 0, len(x)) for sequence, x in enumerate(states)], (0, 2))[0].split(
        [len(x) for x in states]
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_broken_row_breaks_no_row_before_it(dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=2)
    (states,) = draw_states((40,), model.config.hidden_size, dtype)
    expected = Side(model, "native", [states], dtype).run([(0, 0, 40)], (0, 2))[0]
    broken = states.clone()
    broken[17:] = torch.nan
    ours = Side(model, "native", [broken], dtype).run([(0, 0, 40)], (0, 2))[0]
    assert torch.equal(ours[:17], expected[:17])
    assert bool(ours[17:].isnan().all())


@torch.inference_mode()
def test_previous_states_are_those_before_the_last_layer() -> None:
    model = tiny_model()
    states = draw_states(LENGTHS, model.config.hidden_size)
    spans = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]
    whole = Side(model, "native", states).run(spans, (0, 4))
    steps = Side(model, "native", states).run(spans, (0, 1, 3, 4))
    assert torch.equal(whole[0], steps[4])
    assert torch.equal(whole[1], steps[2])
    nothing = Side(model, "native", states).run(spans, (2, 2))
    assert torch.equal(nothing[0], torch.cat(states))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head", ["norm", "block"])
@torch.inference_mode()
def test_fill_is_what_each_layers_own_norm_and_projection_make_of_the_state(name: str, head: Any) -> None:
    model = tiny_model(ExitConfig((1, 2), head), **VARIANTS[name])
    states = draw_states(LENGTHS, model.config.hidden_size)
    native, plain = (Side(model, kernels, states) for kernels in ("native", "plain"))
    spans = [(1, 2, 5), (3, 44, 45), (2, 0, 30)]
    rows = native.rows(spans)
    x = torch.cat([states[sequence][start:stop] for sequence, start, stop in spans])
    for exit_layer in (1, 2):
        native.cache.data.fill_(torch.nan)
        plain.cache.data.fill_(torch.nan)
        native.packed.fill(exit_layer, x, rows, native.cache)
        for index in range(exit_layer, model.config.num_layers):
            plain.packed.layers.write(index, x, rows, plain.cache)
        block = plain.packed.exits[2].block
        if block is not None and exit_layer == 1:
            block.write(x, rows, plain.cache)
        torch.testing.assert_close(native.cache.data, plain.cache.data, rtol=1e-5, atol=1e-5, equal_nan=True)
        filled = native.packed.num_cache_layers - native.packed.exits[exit_layer].next_cache_layer
        assert int(native.cache.data[:, :, 0].isfinite().sum()) == len(x) * filled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_filled_rows_bits_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    model = tiny_model(ExitConfig((1, 2), "norm"), model_type="qwen3")
    states = draw_states(LENGTHS, model.config.hidden_size, dtype)
    together, apart = (Side(model, "native", states, dtype) for _ in range(2))
    torch.set_num_threads(2)
    together.packed.fill(1, states[3], together.rows([(3, 0, 47)]), together.cache)
    torch.set_num_threads(1)
    for position in range(47):
        row = apart.rows([(3, position, position + 1)])
        apart.packed.fill(1, states[3][position : position + 1], row, apart.cache)
    assert torch.equal(together.cache.data.nan_to_num(7.0), apart.cache.data.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "odd-sizes"])
@torch.inference_mode()
def test_an_exit_block_writes_what_it_writes_when_it_runs(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(ExitConfig((1, 3), "block"), **VARIANTS[name])
    states = draw_states(LENGTHS, model.config.hidden_size, dtype)
    ran, wrote = (Side(model, "native", states, dtype) for _ in range(2))
    rows = ran.rows([(2, 0, 30), (0, 0, 1)])
    x = torch.cat((states[2], states[0]))
    for exit_layer in (1, 3):
        for side in (ran, wrote):
            block = side.packed.exits[exit_layer].block
            assert block is not None
            if side is ran:
                block.run(x, rows, side.cache)
            else:
                block.write(x, rows, side.cache)
    assert torch.equal(ran.cache.data.nan_to_num(7.0), wrote.cache.data.nan_to_num(7.0))
    # Behind layers 1 and 3 of the backbone, in the order in which rows pass them.
    written = ran.cache.data[:, rows.slots].isfinite().flatten(1).all(dim=1)
    assert written.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "exits",
    [
        ExitConfig((2,), "bare"),
        ExitConfig((2,), "final"),
        ExitConfig((2,), "norm"),
        ExitConfig((2,), "adapter"),
        ExitConfig((2,), "adapter", adapter_dim=16),
        ExitConfig((2,), "mlp"),
    ],
    ids=lambda exits: f"{exits.head}-{exits.adapter_dim}",
)
@torch.inference_mode()
def test_exit_states_are_those_of_the_model(exits: ExitConfig, dtype: torch.dtype) -> None:
    model = tiny_model(exits)
    states = draw_states(LENGTHS, model.config.hidden_size, dtype)
    side = Side(model, "native", states, dtype)
    x, rows = states[3], side.rows([(3, 0, 47)])
    ours = side.packed.exit_state(2, x, rows, side.cache)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(ours.float(), model.exit_state(x.float(), 2), rtol=tolerance, atol=tolerance)
    each = [side.packed.exit_state(2, x[i : i + 1], rows.select(np.array([i])), side.cache) for i in range(47)]
    assert torch.equal(torch.cat(each), ours)


@torch.inference_mode()
def test_released_weights_are_gone_and_the_layers_go_on() -> None:
    states = draw_states(LENGTHS, 32)
    spans = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]
    expected = Side(tiny_model(), "native", states).run(spans)
    model, side = tiny_model(), Side(tiny_model(), "native", states)
    side.packed = PackedModel(model, torch.float32, "native", release=True)
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(side.run(spans), expected, strict=True))


@torch.inference_mode()
def test_rows_that_lie_nowhere_are_refused() -> None:
    model = tiny_model()
    states = draw_states((20,), model.config.hidden_size)
    side = Side(model, "native", states)
    rows = side.rows([(0, 0, 20)])

    def run(rows: Rows, x: Tensor = states[0]) -> None:
        side.packed.run_layers(x, rows, side.cache, 0, 4)

    def changed(**fields: Tensor) -> Rows:
        return dataclasses.replace(rows, **fields)

    run(rows)
    with pytest.raises(RuntimeError, match="slot 1024 of row 0 is outside of the cache of 1024 slots"):
        run(changed(slots=rows.slots + 1024 - rows.slots[0]))
    with pytest.raises(RuntimeError, match="position -1 of row 0"):
        run(changed(positions=rows.positions - 1))
    with pytest.raises(RuntimeError, match="position 256 of row 19 is outside of the 256 positions"):
        run(changed(positions=rows.positions + 237))
    with pytest.raises(RuntimeError, match="sequence 1 of row 0 has no table"):
        run(changed(sequences=rows.sequences + 1))
    with pytest.raises(RuntimeError, match="block 256 is outside of the cache"):
        run(changed(block_tables=torch.full_like(rows.block_tables, 256)))
    with pytest.raises(RuntimeError, match="position 4 of row 4 is outside of a table of 1 blocks"):
        run(changed(block_tables=rows.block_tables[:, :1].contiguous()))
    with pytest.raises(RuntimeError, match="cache is Float; expected BFloat16"):
        run(rows, states[0].bfloat16())
    with pytest.raises(RuntimeError, match=r"positions has shape \[20\]; expected \[19\]"):
        run(rows, states[0][:19])
    with pytest.raises(RuntimeError, match="layers 2 to 5 are not among the 4"):
        side.packed.run_layers(states[0], rows, side.cache, 2, 5)


@torch.inference_mode()
def test_rows_that_are_filled_in_slices_are_filled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(ExitConfig((1, 2), "norm"))
    states = draw_states(LENGTHS, model.config.hidden_size)
    whole, sliced = (Side(model, "native", states) for _ in range(2))
    spans = [(1, 2, 5), (2, 0, 30), (3, 3, 47)]
    x = torch.cat([states[sequence][start:stop] for sequence, start, stop in spans])
    whole.packed.fill(1, x, whole.rows(spans), whole.cache)
    monkeypatch.setattr(packed, "FILL_SLICE", 9)
    sliced.packed.fill(1, x, sliced.rows(spans), sliced.cache)
    assert torch.equal(whole.cache.data.nan_to_num(7.0), sliced.cache.data.nan_to_num(7.0))
