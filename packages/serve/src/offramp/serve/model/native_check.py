"""Whether a library of C++ kernels computes what torch does: asked once when it is loaded, before it is trusted.

A compiler may be broken, and a processor may lack what it claims. So every kernel that the engine runs is compared with
plain arithmetic in float64, on inputs that are small and whose sizes fit no vector.

Legend: N rows, T keys, D model, F feed-forward, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.model.quantization import quantize

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_EPS = 1e-5


@dataclass(frozen=True)
class _LayerShape:
    """Sizes of a layer and of the cache that it attends to; `window` 0 is all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    block_size: int
    window: int


# Keys that lie apart and keys that lie together; heads that fill a vector and heads that do not.
_LAYER_SHAPES = (_LayerShape(4, 2, 10, 37, 51, 4, 0), _LayerShape(3, 1, 64, 64, 32, 16, 20))
# Tokens of two sequences. The softmax is taken over 128 keys at a time, so the first needs its correction.
_LENGTHS = (150, 9)


def agrees_with_torch(ops: Any) -> bool:
    """Whether maps, norms, heads, attention and whole layers of a library are torch's, but for rounding.

    Args:
        ops: namespace of the C++ operations.
    """
    return all(
        _maps_agree(ops, dtype)
        and all(_exits_agree(ops, dtype, gated=gated) for gated in (True, False))
        and all(_layers_agree(ops, dtype, shape) for shape in _LAYER_SHAPES)
        and all(_t5_layers_agree(ops, dtype, gated=gated) for gated in (True, False))
        for dtype in _TOLERANCES
    )


def _maps_agree(ops: Any, dtype: torch.dtype) -> bool:
    """Linear maps, the norm and the head."""
    generator = torch.Generator().manual_seed(0)
    matrix, offset, rows = (torch.randn(size, generator=generator).to(dtype) for size in ((70, 45), (70,), (5, 45)))
    packed = ops.pack_linear(matrix)
    gated = ops.gated_linear(rows, ops.pack_linear(matrix, gated=True), None, 35)
    head = ops.head(rows, packed, 70)
    logits = F.linear(rows.double(), matrix.double())
    best = logits.topk(2).values
    gates, ups = logits.chunk(2, dim=1)
    quantized = quantize(matrix)
    int8, scales = ops.pack_int8(quantized.values, quantized.scales, dtype)
    return all(
        _close(ours, exact, dtype)
        for ours, exact in (
            (ops.linear(rows, packed, ops.pack_bias(offset), 70), logits + offset.double()),
            (
                ops.linear(rows, int8, None, 70, scales=scales),
                F.linear(rows.double(), quantized.dequantized(dtype).double()),
            ),
            (gated, F.silu(gates) * ups),
            (ops.rms_norm(rows, matrix[0].contiguous(), _EPS), _norm(rows.double(), matrix[0].double())),
            (torch.stack(head[1:3], 1), best),
            (head[3], logits.logsumexp(1)),
            (logits.gather(1, head[0][:, None])[:, 0], best[:, 0]),
        )
    )


def _exits_agree(ops: Any, dtype: torch.dtype, *, gated: bool) -> bool:
    """An exit head that has all it can have, its inner map gated or plain, the exit test, and the cosine of states."""
    generator = torch.Generator().manual_seed(2)
    x, inner_norm, norm = (torch.randn(size, generator=generator).to(dtype) for size in ((6, 45), (45,), (45,)))
    inner, down, unembedding = (
        (torch.randn(size, generator=generator) / 7).to(dtype)
        for size in ((26 if gated else 13, 45), (45, 13), (70, 45))
    )
    packed = (ops.pack_linear(inner, gated=gated), None, None, 13, gated, ops.pack_linear(down), None, None)
    head = (inner_norm, *packed, True, norm, _EPS)
    wide = x.double()
    mapped = F.linear(_norm(wide, inner_norm.double()), inner.double())
    activated = F.silu(mapped[:, :13]) * mapped[:, 13:] if gated else F.silu(mapped)
    scale = wide.pow(2).mean(dim=1, keepdim=True).add(_EPS).sqrt()
    exact = _norm(wide + F.linear(activated, down.double()) * scale, norm.double())
    state, token_ids, best, _, _, margin = ops.exit_test(x, *head, ops.pack_linear(unembedding), None, 70, None, True)
    logits = F.linear(state.double(), unembedding.double())
    shares = logits.softmax(dim=1).topk(2).values
    return all(
        _close(ours, expected, dtype)
        for ours, expected in (
            (ops.exit_state(x, *head), exact),
            (state, exact),
            (best, logits.amax(dim=1)),
            (logits.gather(1, token_ids[:, None])[:, 0], logits.amax(dim=1)),
            (margin, shares[:, 0] - shares[:, 1]),
            (ops.cosine(x, state), F.cosine_similarity(wide, state.double(), dim=1)),
        )
    )


def _layers_agree(ops: Any, dtype: torch.dtype, shape: _LayerShape) -> bool:
    """Two layers with paged attention, on prompts and then on one more token of each; and filled keys and values."""
    generator = torch.Generator().manual_seed(1)
    layer_sizes = (
        (shape.hidden,),
        ((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden),
        (shape.hidden, shape.num_heads * shape.head_dim),
        (shape.hidden,),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    )
    layers = [  # such that sums are of size 1
        tuple(
            (torch.randn(size, generator=generator) / size[-1] ** (len(size) / 2 - 0.5)).to(dtype)
            for size in layer_sizes
        )
        for _ in range(2)
    ]
    states = [torch.randn(length, shape.hidden, generator=generator).to(dtype) for length in _LENGTHS]
    frequencies = 1e4 ** -(torch.arange(shape.head_dim // 2).double() / (shape.head_dim // 2))
    angles = torch.arange(max(_LENGTHS))[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()

    # Blocks of both sequences in no order; what nobody writes is NaN.
    width = -(-max(_LENGTHS) // shape.block_size)
    tables = torch.randperm(2 * width, generator=generator).view(2, width).int()
    row_size = 2 * shape.num_kv_heads * shape.head_dim
    cache = torch.full((len(layers), 2 * width * shape.block_size, row_size), torch.nan, dtype=dtype)
    input_norm, qkv, output, mlp_norm, gate_up, down = (torch.stack(parts) for parts in zip(*layers, strict=True))
    weights = (
        *(input_norm, _packed(ops, qkv), None, None, None, None),
        *(_packed(ops, output), None, None, mlp_norm),
        *(_packed(ops, gate_up, gated=True), None, None, _packed(ops, down), None, None),
    )
    exact = [_reference(x.double(), layers, angles, shape) for x in states]
    parts = [[(0, length - 1) for length in _LENGTHS], [(length - 1, length) for length in _LENGTHS]]
    for spans in parts:
        positions = torch.cat([torch.arange(*span) for span in spans])
        sequences = torch.cat([torch.full((stop - start,), i) for i, (start, stop) in enumerate(spans)])
        slots = tables[sequences, positions // shape.block_size].long() * shape.block_size
        slots += positions % shape.block_size
        places = (positions, slots, sequences.int(), tables, cos, sin)
        ours = ops.run_layers(
            *(torch.cat([x[slice(*span)] for x, span in zip(states, spans, strict=True)]), cache, *places, *weights),
            *([0, 1], 0, 2, shape.num_heads, shape.intermediate, shape.block_size, shape.window, _EPS),
        )
        theirs = torch.cat([x[slice(*span)] for x, span in zip(exact, spans, strict=True)])
        if not _close(ours[0], theirs, dtype):
            return False

    # Keys and values alone, as they are written above an exit: of one layer, and of many in one product.
    num_rows, kv_size = len(states[0]), shape.num_kv_heads * shape.head_dim
    places = (torch.arange(num_rows), torch.arange(num_rows), cos, sin)
    ones, first_key = torch.ones_like(input_norm), shape.num_heads * shape.head_dim
    cache = cache.fill_(torch.nan)
    ops.write_kv(states[0], cache, *places, ones, _packed(ops, qkv), None, None, None, 0, 0, shape.num_heads, _EPS)
    alone = cache[0, :num_rows].clone()
    ops.fill(states[0], cache, *places, _packed(ops, qkv[:, first_key:]), None, None, None, 0, 0, _EPS)
    normed = _norm(states[0].double(), ones[0].double())
    keys_values = [F.linear(normed, maps[first_key:].double()) for maps in qkv]
    theirs = torch.stack(
        [
            torch.cat(
                (_rotated(kv[:, :kv_size].unflatten(1, (-1, shape.head_dim)), angles).flatten(1), kv[:, kv_size:]), 1
            )
            for kv in keys_values
        ]
    )
    return _close(alone, theirs[0], dtype) and _close(cache[:, :num_rows], theirs, dtype)


def _t5_layers_agree(ops: Any, dtype: torch.dtype, *, gated: bool) -> bool:
    """Two decoder layers of T5 on texts and then on one more token of each, with sources in the same cache."""
    generator = torch.Generator().manual_seed(3)
    heads, head_dim, hidden, intermediate, size = (3, 10, 37, 51, 4) if gated else (2, 64, 64, 32, 16)
    inner, sources, longest = heads * head_dim, (5, 140), max(_LENGTHS)

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * gain).to(dtype)

    layers = [
        (
            *(
                draw(hidden),
                draw(3 * inner, hidden, gain=0.4 * hidden**-0.5),
                draw(hidden, inner, gain=0.5 * inner**-0.5),
            ),
            *(draw(hidden), draw(inner, hidden, gain=0.4 * hidden**-0.5), draw(hidden, inner, gain=0.5 * inner**-0.5)),
            *(draw(hidden), draw((1 + gated) * intermediate, hidden, gain=hidden**-0.5)),
            draw(hidden, intermediate, gain=0.5 * intermediate**-0.5),
        )
        for _ in range(2)
    ]
    bias = torch.randn(heads, longest, generator=generator)
    states = [draw(length, hidden) for length in _LENGTHS]

    # Blocks of texts and sources in no order; what nobody writes is NaN.
    width = -(-longest // size)
    tables = torch.randperm(4 * width, generator=generator).view(2, 2, width).int()
    cache = torch.full((2, 4 * width * size, 2 * inner), torch.nan, dtype=dtype)
    for sequence, length in enumerate(sources):
        places = torch.arange(length)
        cache[:, tables[1, sequence, places // size].long() * size + places % size] = draw(
            2, length, 2 * inner, gain=0.5
        )
    input_norm, qkv, output, cross_norm, query, cross_output, mlp_norm, ups, down = (
        torch.stack(parts) for parts in zip(*layers, strict=True)
    )
    weights = (
        *(input_norm, _packed(ops, qkv), None, _packed(ops, output), None),
        *(cross_norm, _packed(ops, query), None, _packed(ops, cross_output), None),
        *(mlp_norm, _packed(ops, ups, gated=gated), None, _packed(ops, down), None),
    )
    exact: list[Tensor] = []
    for sequence, x in enumerate(states):
        places = torch.arange(sources[sequence])
        source = cache[:, tables[1, sequence, places // size].long() * size + places % size].double()
        exact.append(_t5_reference(x.double(), layers, source, bias.double(), gated))
    lengths = torch.tensor(sources)
    table = F.pad(bias.flip(1), (0, 16)).contiguous()
    for spans in [[(0, length - 1) for length in _LENGTHS], [(length - 1, length) for length in _LENGTHS]]:
        positions = torch.cat([torch.arange(*span) for span in spans])
        sequences = torch.cat([torch.full((stop - start,), i) for i, (start, stop) in enumerate(spans)])
        slots = tables[0, sequences, positions // size].long() * size + positions % size
        ours = ops.run_t5_layers(
            *(torch.cat([x[slice(*span)] for x, span in zip(states, spans, strict=True)]), cache, positions, slots),
            *(sequences.int(), tables[0].contiguous(), lengths, tables[1].contiguous(), table, *weights),
            *([0, 1], 0, 2, heads, intermediate, gated, size, _EPS),
        )
        theirs = torch.cat([x[slice(*span)] for x, span in zip(exact, spans, strict=True)])
        if not _close(ours[0], theirs, dtype):
            return False
    return True


def _t5_reference(
    x: Tensor, layers: list[tuple[Tensor, ...]], sources: Tensor, distance_bias: Tensor, gated: bool
) -> Tensor:
    """States [T, D] of a whole text after the layers, by the book; `sources` are [layers, tokens, 2 * H * E]."""
    length, heads = len(x), len(distance_bias)
    distances = torch.arange(length)[:, None] - torch.arange(length)
    bias = distance_bias[:, distances.clamp(min=0)].masked_fill(distances < 0, -torch.inf)

    def attended(query: Tensor, keys_values: Tensor, bias: Tensor | float) -> Tensor:
        parts = [part.unflatten(1, (heads, -1)) for part in (query, *keys_values.chunk(2, dim=1))]
        shares = (torch.einsum("nhe,the->hnt", parts[0], parts[1]) + bias).softmax(dim=-1)
        return torch.einsum("hnt,the->nhe", shares, parts[2]).flatten(1)

    for layer, source in zip(layers, sources, strict=True):
        input_norm, qkv, output, cross_norm, query, cross_output, mlp_norm, ups, down = (w.double() for w in layer)
        made = F.linear(_norm(x, input_norm), qkv)
        inner = made.shape[1] // 3
        x = x + F.linear(attended(made[:, :inner], made[:, inner:], bias), output)
        x = x + F.linear(attended(F.linear(_norm(x, cross_norm), query), source, 0.0), cross_output)
        up = F.linear(_norm(x, mlp_norm), ups)
        if gated:
            gate, up = up.chunk(2, dim=1)
            up = F.gelu(gate, approximate="tanh") * up
        else:
            up = F.relu(up)
        x = x + F.linear(up, down)
    return x


def _packed(ops: Any, maps: Tensor, *, gated: bool = False) -> Tensor:
    return torch.stack([ops.pack_linear(weight.contiguous(), gated) for weight in maps])


def _reference(x: Tensor, layers: list[tuple[Tensor, ...]], angles: Tensor, shape: _LayerShape) -> Tensor:
    """States [T, D] of a whole sequence after the layers, by the book."""
    length = len(x)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (shape.window or length))
    for layer in layers:
        input_norm, qkv, output, mlp_norm, gate_up, down = (weight.double() for weight in layer)
        heads = F.linear(_norm(x, input_norm), qkv).view(length, -1, shape.head_dim)
        rotated = _rotated(heads, angles)
        keys, values = (
            part.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)[index].repeat_interleave(
                shape.num_heads // shape.num_kv_heads, dim=1
            )
            for part, index in ((rotated, 1), (heads, 2))
        )
        scores = torch.einsum("nhe,the->hnt", rotated[:, : shape.num_heads], keys) / shape.head_dim**0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        x = x + F.linear(torch.einsum("hnt,the->nhe", shares, values).flatten(1), output)
        gates, ups = F.linear(_norm(x, mlp_norm), gate_up).chunk(2, dim=1)
        x = x + F.linear(F.silu(gates) * ups, down)
    return x


def _rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Heads [T, H, E] of the positions from 0 on, by angles [*, E / 2]."""
    cos, sin = angles[: len(heads), None].cos(), angles[: len(heads), None].sin()
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, _EPS)


def _close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCES[dtype]
    return torch.allclose(ours.double(), exact, rtol=tolerance, atol=tolerance)
