"""How the layers of each family are packed: what differs between families is here, and the rest in `packed`.

Legend: H heads, E head dim, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from offramp.common.families import AnyModel
from offramp.common.model.block import Block
from offramp.common.model.config import ModelConfig
from offramp.common.model.rope import inverse_frequencies, rotary_tables
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.t5.block import DecoderBlock
from offramp.common.t5.model import MultiExitT5
from offramp.serve.model.encoder_t5 import PackedEncoder
from offramp.serve.model.flash_attention import can_flash
from offramp.serve.model.graphs import Capture
from offramp.serve.model.layers import Fill, Layers
from offramp.serve.model.layers_graphed import GraphedLayers
from offramp.serve.model.layers_native import NativeFill, NativeLayers
from offramp.serve.model.layers_t5 import T5Fill, T5Layers, distance_bias
from offramp.serve.model.layers_t5_native import NativeT5Layers
from offramp.serve.model.layers_torch import TorchFill, TorchLayers
from offramp.serve.model.linear import ChosenKernels
from offramp.serve.model.native import native_library
from offramp.serve.model.rows import RowContext


@dataclass(frozen=True)
class Packing:
    """Settings of all layers of a model.

    Attributes:
        dtype: of weights and states.
        device: of weights and states.
        kernels: what computes.
        int8_for: see `PackedLinear`.
        release: give up each block's own weights once it is packed.
        capture: records the layers for few rows, see `GraphedLayers`; None: nothing is recorded.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: ChosenKernels
    int8_for: torch.dtype | None
    release: bool
    capture: Capture | None


class FamilyLayers(Protocol):
    """Packs the layers of one model."""

    def layers(self, blocks: Sequence[nn.Module], cache_layers: Sequence[int]) -> Layers:
        """A stack of blocks with their places in the cache."""
        ...

    def fill(self, blocks: Sequence[nn.Module], first: int, starts: Sequence[int]) -> Fill:
        """What fills cache layers from `first` on, which belong to `blocks`; exits are followed by `starts`."""
        ...

    def encoder(self) -> PackedEncoder | None:
        """What reads sources; None in a decoder-only model."""
        ...

    def row_context(self, max_model_len: int, block_size: int) -> RowContext:
        """What rows share; sequences have at most `max_model_len` tokens."""
        ...


def family_layers(model: AnyModel, packing: Packing) -> FamilyLayers:
    """For the family of a model."""
    return _T5(model, packing) if isinstance(model, MultiExitT5) else _DecoderOnly(model, packing)


class _DecoderOnly:
    """`MultiExitTransformer`."""

    def __init__(self, model: MultiExitTransformer, packing: Packing) -> None:
        self._config: ModelConfig = model.config
        self._packing = packing
        self._library = native_library() if packing.kernels == "native" else None

    def layers(self, blocks: Sequence[nn.Module], cache_layers: Sequence[int]) -> Layers:
        packing, own = self._packing, cast(Sequence[Block], blocks)
        if self._library is not None:
            return NativeLayers(
                *(self._library.ops, own, self._config, cache_layers),
                int8_for=packing.int8_for,
                release=packing.release,
            )
        layers = TorchLayers(
            *(own, self._config, cache_layers),
            kernels=packing.kernels,
            int8_for=packing.int8_for,
            release=packing.release,
        )
        return layers if packing.capture is None else GraphedLayers(layers, packing.capture)

    def fill(self, blocks: Sequence[nn.Module], first: int, starts: Sequence[int]) -> Fill:
        packing, own = self._packing, cast(Sequence[Block], blocks)
        if self._library is not None:
            return NativeFill(self._library.ops, own, self._config, first, int8_for=packing.int8_for)
        return TorchFill(own, self._config, first, starts, kernels=packing.kernels, int8_for=packing.int8_for)

    def encoder(self) -> None:
        return None

    def row_context(self, max_model_len: int, block_size: int) -> RowContext:
        """With rotary tables.

        Frequencies of `dynamic` scaling depend on the longest sequence attended over. The engine takes the longest it
        ever serves for every request, so that a request's keys stay valid as it grows and its tokens do not depend on
        its neighbours.
        """
        config, packing = self._config, self._packing
        frequencies = inverse_frequencies(config.rope, config.head_dim, max_model_len)
        cos, sin = rotary_tables(frequencies, torch.arange(max_model_len))
        half = config.head_dim // 2
        has_flash = can_flash(packing.device, packing.dtype, config.head_dim, block_size)
        window = config.sliding_window
        return RowContext(cos[:, :half], sin[:, :half], packing.dtype, block_size, window, packing.device, has_flash)


class _T5:
    """`MultiExitT5`."""

    def __init__(self, model: MultiExitT5, packing: Packing) -> None:
        self._model, self._packing = model, packing

    def layers(self, blocks: Sequence[nn.Module], cache_layers: Sequence[int]) -> Layers:
        packing, own = self._packing, cast(Sequence[DecoderBlock], blocks)
        library = native_library() if packing.kernels == "native" else None
        if library is not None:
            return NativeT5Layers(
                *(library.ops, own, self._model.config, cache_layers),
                int8_for=packing.int8_for,
                release=packing.release,
            )
        return T5Layers(
            *(own, self._model.config, cache_layers),
            kernels=packing.kernels,
            int8_for=packing.int8_for,
            release=packing.release,
        )

    def fill(self, blocks: Sequence[nn.Module], first: int, starts: Sequence[int]) -> Fill:
        packing, own = self._packing, cast(Sequence[DecoderBlock], blocks)
        return T5Fill(own, self._model.config, first, starts, kernels=packing.kernels, int8_for=packing.int8_for)

    def encoder(self) -> PackedEncoder:
        packing = self._packing
        return PackedEncoder(
            self._model,
            packing.dtype,
            kernels=packing.kernels,
            int8_for=packing.int8_for,
            release=packing.release,
        )

    def row_context(self, max_model_len: int, block_size: int) -> RowContext:
        """With the relative bias; nothing is rotated."""
        packing = self._packing
        nothing = torch.empty(max_model_len, 0)
        bias = distance_bias(self._model.relative_attention_bias, max_model_len, packing.dtype)
        return RowContext(
            *(nothing, nothing, packing.dtype, block_size, None, packing.device), distance_bias=bias.to(packing.device)
        )
