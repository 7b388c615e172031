"""Weights of a block as the engine lays them out: linear maps with one input as one map, and norms folded into them.

Legend: D model, O output features, K key/value heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offramp.common.model.block import Block
from offramp.common.t5.block import DecoderBlock


def stacked(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights [O, D] and biases [O] of linear maps with one input, as of one map."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    if len(linears) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


def fill_weights(block: Block | DecoderBlock, *, keep_fp32: bool = False) -> tuple[Tensor, Tensor | None]:
    """Weight [2 * K * E, D] and bias of keys and values of self-attention, for states that are normed without a weight.

    All layers above an exit see the same state there, and their input norms differ only by a weight vector. With that
    folded in, one product with the stacked weights of many layers *fills* them all. `keep_fp32` does not round it to
    the weight's type, for something else will.
    """
    weight, bias = stacked(block.self_attn.k_proj, block.self_attn.v_proj)
    folded = weight.float() * block.input_layernorm.weight.detach().float()
    return folded if keep_fp32 else folded.to(weight.dtype), bias
