"""The weights of a `MultiExitTransformer`, packed once for the engine, and the forward of one layer on packed rows.

There is one definition of the model, `offramp.common.model`; this is its second forward: query, key and value weights
in one matrix, gate and up in another, keys and values in the paged cache. Exit heads without a block are few operations
on rows and are used as they are defined there.

Legend: N rows, D model, F feed-forward, H query heads, K key/value heads, E head dim, V vocabulary, L layers, C cache
layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from offramp.common.model.attention import Attention
from offramp.common.model.block import Block
from offramp.common.model.config import ModelConfig
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.rope import inverse_frequencies, rotary_tables
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.config import Kernels
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model import ops
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.rows import RowContext, Rows


class PackedLayer:
    """One Transformer block: a layer of the backbone, or the block of an exit head."""

    def __init__(self, block: Block, config: ModelConfig, cache_layer: int, pack: bool) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.cache_layer = cache_layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.input_norm = block.input_layernorm.weight.detach()
        self.qkv = PackedLinear(*_stacked(attention.q_proj, attention.k_proj, attention.v_proj), pack=pack)
        self.qk_norm = _head_norms(attention, config)
        self.output = PackedLinear(attention.o_proj.weight, attention.o_proj.bias, pack=pack)
        self.mlp_norm = block.post_attention_layernorm.weight.detach()
        self.gate_up = PackedLinear(*_stacked(mlp.gate_proj, mlp.up_proj), pack=pack)
        self.down = PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias, pack=pack)

    def run(self, x: Tensor, rows: Rows, cache: KVStorage) -> Tensor:
        """States [N, D] -> [N, D]; the rows' keys and values are in the cache before any of them is read."""
        query = self._project(x, rows, cache)
        out = ops.attend(query, cache.data[self.cache_layer], rows, self.num_kv_heads)
        x = x + self.output(out)
        return x + self.down(ops.gated_silu(self.gate_up(ops.rms_norm(x, self.mlp_norm, self.eps))))

    def write(self, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Only the rows' keys and values."""
        self._project(x, rows, cache)

    def _project(self, x: Tensor, rows: Rows, cache: KVStorage) -> Tensor:
        """Write keys and values of states [N, D], return queries [N, H, E]."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(ops.rms_norm(x, self.input_norm, self.eps)).view(len(x), -1, self.head_dim)
        rotated, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.qk_norm is not None:
            rotated = ops.rms_norm(rotated, None, self.eps) * self.qk_norm
        rotated = ops.rotate(rotated, rows.cos, rows.sin)
        keys_values = torch.cat((rotated[:, self.num_heads :], values), dim=1)
        cache.write(self.cache_layer, rows.slots, keys_values.view(len(x), -1))
        return rotated[:, : self.num_heads]


class PackedFill:
    """Keys and values of a run of cache layers, all made from one state: the *fill* of skipped layers.

    All of them read the same state, and their input norms differ only by a weight vector. So the state is normed once
    without a weight, and each norm's weight is folded into its layer's key and value projections: one matrix product
    fills the whole run.
    """

    def __init__(self, blocks: list[Block], config: ModelConfig, first: int, pack: bool) -> None:
        """Pack.

        Args:
            blocks: what the cache layers belong to, ascending.
            config: of the model.
            first: cache layer of the first of them.
            pack: see `PackedLinear`.
        """
        self.first, self.stop = first, first + len(blocks)
        self.num_kv_heads, self.head_dim, self.eps = config.num_kv_heads, config.head_dim, config.rms_norm_eps
        weights, biases = [], []
        for block in blocks:
            weight, bias = _stacked(block.self_attn.k_proj, block.self_attn.v_proj)
            weights.append((weight.float() * block.input_layernorm.weight.detach().float()).to(weight.dtype))
            biases.append(bias)
        bias = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))
        self.kv = PackedLinear(torch.cat(weights), bias, pack=pack)
        self.key_norm: Tensor | None = None
        if config.qk_norm:
            norms = [block.self_attn.k_norm for block in blocks]
            self.key_norm = torch.stack([norm.weight.detach() for norm in norms if norm is not None])[:, None]

    def write(self, normed: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Fill these layers' slots of `rows` from states [N, D] that were normed without a weight."""
        shape = (len(normed), self.stop - self.first, 2 * self.num_kv_heads, self.head_dim)
        keys_values = self.kv(normed).view(shape)
        keys, values = keys_values[:, :, : self.num_kv_heads], keys_values[:, :, self.num_kv_heads :]
        if self.key_norm is not None:
            keys = ops.rms_norm(keys, None, self.eps) * self.key_norm
        keys = ops.rotate(keys, rows.cos[:, None], rows.sin[:, None])
        filled = torch.cat((keys, values), dim=2).flatten(2)
        cache.write_layers(self.first, self.stop, rows.slots, filled.transpose(0, 1))


@dataclass(frozen=True)
class PackedExit:
    """One exit, the final one included.

    Attributes:
        layer: exit layer.
        head: transform of an early exit as `common` defines it; None at the final exit, and where `block` is all.
        block: the head's block, run on the cache.
        norm: [D] weight of the norm before the unembedding; None if there is none or `head` has it.
        unembed: D -> V.
        unembedding: [V, D] plain, for shortlists.
        fills: what a row that leaves here has to fill, ascending.
    """

    layer: int
    head: ExitHead | None
    block: PackedLayer | None
    norm: Tensor | None
    unembed: PackedLinear
    unembedding: Tensor
    fills: tuple[PackedFill, ...]


class PackedModel:
    """All weights of a model, and what they need of its configuration.

    Attributes:
        config: shape of the model.
        layers: the backbone.
        exits: exit layer -> exit, ascending; the final one is the last.
        num_cache_layers: C. An exit head with a block has a cache layer of its own, after that of its exit layer.
        has_exit_blocks: whether exit heads have blocks.
    """

    def __init__(
        self, model: MultiExitTransformer, dtype: torch.dtype, kernels: Kernels = "auto", *, release: bool = False
    ) -> None:
        """Pack.

        Args:
            model: weights.
            dtype: of weights and states.
            kernels: what computes the layers; see `Kernels`.
            release: give the model's own weights up as they are packed, so that they are not in memory twice; the model
                can then not be run any more.
        """
        pack = kernels != "plain"
        model = model if model.embed_tokens.weight.dtype == dtype else copy.deepcopy(model).to(dtype)
        config = self.config = model.config
        self.dtype = dtype
        self._embedding = model.embed_tokens.weight.detach()
        self.has_exit_blocks = model.exit_config.head == "block"
        final_norm = model.norm.weight.detach()
        heads = {e: cast(ExitHead, model.exits[str(e)]) for e in model.exit_config.layers}

        # Cache layers lie in the order in which a row passes them, so what an exit has to fill is one run to the end.
        order: list[Block] = []
        runs: list[tuple[int, int]] = []  # of cache layers, between neighbouring exits
        self.layers: list[PackedLayer] = []
        exit_blocks: dict[int, PackedLayer] = {}
        start = 0
        for index, module in enumerate(model.layers):
            block = cast(Block, module)
            self.layers.append(PackedLayer(block, config, len(order), pack))
            order.append(block)
            head = heads.get(index + 1)
            if head is not None and head.block is not None:
                exit_blocks[index + 1] = PackedLayer(head.block, config, len(order), pack)
                order.append(head.block)
            if head is not None or index + 1 == config.num_layers:
                runs.append((start, len(order)))
                start = len(order)
        self.num_cache_layers = len(order)
        fills = [PackedFill(order[first:stop], config, first, pack) for first, stop in runs[1:]]

        shared = model.unembedding().detach()
        unembed = PackedLinear(shared, pack=pack)
        self.exits: dict[int, PackedExit] = {}
        for number, (layer, head) in enumerate(heads.items()):
            own = None if head.unembed is None else head.unembed.weight.detach()
            block_norm = None if head.norm is None or head.block is None else head.norm.weight.detach()
            self.exits[layer] = PackedExit(
                layer=layer,
                head=head if head.block is None else None,
                block=exit_blocks.get(layer),
                norm=final_norm if model.exit_config.head == "final" else block_norm,
                unembed=unembed if own is None else PackedLinear(own, pack=pack),
                unembedding=shared if own is None else own,
                fills=tuple(fills[number:]),
            )
        self.exits[config.num_layers] = PackedExit(config.num_layers, None, None, final_norm, unembed, shared, fills=())
        if release:
            model.layers.to("meta")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] -> [N, D]."""
        return self._embedding[token_ids]

    def row_context(self, max_model_len: int, block_size: int) -> RowContext:
        """What rows of this model share, with rotary tables for `max_model_len` tokens.

        Frequencies of `dynamic` scaling depend on the longest sequence attended over. The engine takes the longest it
        ever serves for every request, so that a request's keys stay valid as it grows and its tokens do not depend on
        its neighbours.
        """
        config = self.config
        frequencies = inverse_frequencies(config.rope, config.head_dim, max_model_len)
        cos, sin = rotary_tables(frequencies, torch.arange(max_model_len))
        half = config.head_dim // 2
        return RowContext(cos[:, :half], sin[:, :half], self.dtype, block_size, config.sliding_window)

    def run_layers(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the backbone on states [N, D] that have been through `start` layers.

        Returns:
            The states [N, D], and those before the last of these layers. `x` itself stays as it is.
        """
        previous = x
        for layer in self.layers[start:stop]:
            x, previous = layer.run(x, rows, cache), x
        return x, previous

    def exit_state(self, layer: int, x: Tensor, rows: Rows, cache: KVStorage) -> Tensor:
        """State [N, D] that the unembedding of exit `layer` reads, from the rows' states after that layer."""
        point = self.exits[layer]
        if point.block is not None:
            x = point.block.run(x, rows, cache)
        elif point.head is not None:
            x = point.head.transform(x)
        return x if point.norm is None else ops.rms_norm(x, point.norm, self.config.rms_norm_eps)

    def fill(self, layer: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write keys and values of all cache layers after exit `layer` from the states [N, D] that left there."""
        normed = ops.rms_norm(x, None, self.config.rms_norm_eps)
        for fill in self.exits[layer].fills:
            fill.write(normed, rows, cache)


def _stacked(*linears: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linear maps with one input, as of one map."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    return weight, torch.cat(biases) if biases else None


def _head_norms(attention: Attention, config: ModelConfig) -> Tensor | None:
    """Norm weights of all query and key heads, [H + K, E]."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    query = attention.q_norm.weight.detach().expand(config.num_heads, -1)
    key = attention.k_norm.weight.detach().expand(config.num_kv_heads, -1)
    return torch.cat((query, key))
