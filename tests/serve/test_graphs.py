"""Layers of captured graphs, and attention over blocks, without CUDA: recorded and replayed, and by a slow oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.recorder import Recorder
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import flash_attention
from offramp.serve.model.attended import Attended
from offramp.serve.model.flash_attention import FlashRuns, can_flash
from offramp.serve.model.layers_graphed import MAX_ROWS, GraphedLayers, row_bucket, table_bucket
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import Rows

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 64, 60


def test_buckets_hold_what_they_are_for_and_are_few() -> None:
    rows = [row_bucket(count) for count in range(1, MAX_ROWS + 1)]
    assert all(count <= bucket <= max(16, 1.5 * count) for count, bucket in enumerate(rows, start=1))
    assert sorted(set(rows)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert [table_bucket(count, 12) for count in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


def _rows(generator: torch.Generator, packed: PackedModel, lengths: list[int], runs: list[int]) -> Rows:
    """The last rows of some sequences: `runs` of each."""
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)
    widest = max(-(-length // BLOCK_SIZE) for length in lengths)
    tables = blocks[: len(lengths) * widest].view(len(lengths), widest).to(torch.int32)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(runs))
    positions = torch.cat([torch.arange(length - run, length) for length, run in zip(lengths, runs, strict=True)])
    slots = tables[sequences, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return Rows(positions, slots, sequences.int(), tables, packed.row_context(MAX_MODEL_LEN, BLOCK_SIZE))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"model_type": "qwen3"}, {"model_type": "mistral", "sliding_window": 7}, {"model_type": "qwen2"}],
    ids=["llama", "qwen3", "window", "qwen2"],
)
def test_replayed_layers_give_what_torch_gives(overrides: Any) -> None:
    """Random batches, one after the other: results of earlier ones stay, and nobody reads what nobody wrote."""
    model, generator, recorder = tiny_model(ExitConfig(()), **overrides), torch.Generator().manual_seed(7), Recorder()
    plain, graphed = (
        PackedModel(model, torch.float32, "plain"),
        PackedModel(model, torch.float32, "plain", capture=recorder),
    )
    shape = (plain.num_cache_layers, NUM_BLOCKS, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
    reference = KVStorage(*shape, torch.float32, poison=True)
    cache = KVStorage(*shape, torch.float32, poison=True, with_scratch=True)
    results: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for _ in range(25):
            count = int(torch.randint(1, 12, (1,), generator=generator))
            lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
            runs = [min(length, 1 + int(torch.randint(0, 3, (1,), generator=generator))) for length in lengths]
            rows = _rows(generator, plain, lengths, runs)
            # What came before: as if earlier iterations had written it.
            reference.data.normal_(generator=generator)
            cache.data[:, : reference.data.shape[1]] = reference.data
            x = torch.randn(len(rows), model.config.hidden_size, generator=generator)
            start = int(torch.randint(0, 3, (1,), generator=generator))
            stop = int(torch.randint(start + 1, 5, (1,), generator=generator))
            wanted = plain.run_layers(x, rows, reference, start, stop)
            found = graphed.run_layers(x, rows, cache, start, stop)
            results += [(one, other) for one, other in zip(found, wanted, strict=True)]
            # Sums of fp32 in another order, of numbers of order 1; what is read from elsewhere is off by as much.
            torch.testing.assert_close(cache.data[:, : reference.data.shape[1]], reference.data, rtol=0, atol=1e-4)
        for one, other in results:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    layers = graphed.layers
    assert isinstance(layers, GraphedLayers)
    assert recorder.replays == 25
    assert len(recorder.results) == layers.num_graphs < 25


def test_what_is_no_decode_is_not_captured() -> None:
    model, generator, recorder = tiny_model(ExitConfig(())), torch.Generator().manual_seed(1), Recorder()
    packed = PackedModel(model, torch.float32, "plain", capture=recorder)
    shape = (packed.num_cache_layers, NUM_BLOCKS, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
    with torch.inference_mode():
        chunk = _rows(generator, packed, [20, 3], [20, 1])
        x = torch.randn(len(chunk), model.config.hidden_size, generator=generator)
        packed.run_layers(x, chunk, KVStorage(*shape, torch.float32, with_scratch=True), 0, 4)
        decode = chunk.select(torch.tensor([19, 20]).numpy())
        packed.run_layers(x[:2], decode, KVStorage(*shape, torch.float32), 0, 4)
        assert recorder.replays == 0
        packed.run_layers(x[:2], decode, KVStorage(*shape, torch.float32, with_scratch=True), 0, 4)
        assert recorder.replays == 1


def _varlen(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """What the documentation of `torch.nn.attention.varlen.varlen_attn` says, row by row."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert keys.stride(-1) == 1
    assert cu_seq_q.is_contiguous()
    assert (query.shape[1] != keys.shape[2]) == enable_gqa
    out = torch.empty_like(query)
    bounds = cu_seq_q.tolist()
    assert max(b - a for a, b in itertools.pairwise(bounds)) == max_q
    assert int(seqused_k.max()) <= max_k
    for run, (start, stop) in enumerate(itertools.pairwise(bounds)):
        length = int(seqused_k[run])
        mine_k, mine_v = (part[block_table[run].long()].flatten(0, 1)[:length] for part in (keys, values))
        for row in range(start, stop):
            at = length - (stop - row)  # aligned at the end
            first = 0 if window_size[0] < 0 else max(0, at - window_size[0])
            last = length - 1 if window_size[1] < 0 else min(length - 1, at + window_size[1])
            for head in range(query.shape[1]):
                kv_head = head * keys.shape[2] // query.shape[1]
                seen_k, seen_v = mine_k[first : last + 1, kv_head], mine_v[first : last + 1, kv_head]
                weights = (seen_k @ query[row, head] / math.sqrt(query.shape[2])).softmax(dim=0)
                out[row, head] = weights @ seen_v
    return out


@pytest.mark.parametrize("window", [None, 5])
def test_runs_of_rows_see_what_gathered_keys_are(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    positions = torch.tensor([0, 3, 4, 5, 9, *range(14), 20])
    sequences = torch.tensor([0, 1, 1, 1, 1, *[2] * 14, 3], dtype=torch.int32)
    tables = torch.randperm(40, generator=generator)[:24].view(4, 6).to(torch.int32)
    cache = torch.randn(40 * BLOCK_SIZE, 2 * 2 * 8, generator=generator)
    query = torch.randn(len(positions), 6, 8, generator=generator)
    cpu = torch.device("cpu")
    wanted = Attended.of(positions, sequences, tables, BLOCK_SIZE, window, torch.float32, cpu).attend(query, cache, 2)
    runs = FlashRuns.of(positions, sequences, tables, BLOCK_SIZE, window, cpu, _varlen)
    assert runs.starts.tolist() == [0, 1, 4, 5, 19, 20]
    torch.testing.assert_close(runs.attend(query, cache, 2), wanted, rtol=0, atol=1e-5)
    single = FlashRuns.of_single(positions.int(), tables[sequences.long()], BLOCK_SIZE, window, _varlen)
    torch.testing.assert_close(single.attend(query, cache, 2), wanted, rtol=0, atol=1e-5)


def test_the_cpu_has_no_flash_attention() -> None:
    assert not can_flash(torch.device("cpu"), torch.bfloat16, 64, 256)


def test_a_kernel_that_looks_at_what_nobody_wrote_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*args: Any, **kwargs: Any) -> Tensor:
        return _varlen(*args, **kwargs) + 0 * args[2][3].sum()  # values of a block that is nobody's

    cpu = torch.device("cpu")
    monkeypatch.setattr(flash_attention, "_kernel", lambda: _varlen)
    assert flash_attention._error(cpu, torch.float32, 8, 64) < 1e-5
    monkeypatch.setattr(flash_attention, "_kernel", lambda: careless)
    assert flash_attention._error(cpu, torch.float32, 8, 64) == math.inf
