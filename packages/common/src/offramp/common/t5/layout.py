"""Who may see whom: in the source, in the target, and from the target to the source.

A row of a batch holds one source and its target, or several pairs packed one after the other. Segment ids say which
tokens belong together; 0 is padding. Positions are counted through the row: only their differences are ever used.

Legend: B batch, T time (target), U time (all target tokens with keys), M source tokens, D model, H heads, E head dim,
L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offramp.common.t5.attention import RelativeAttentionBias

KeysValues = tuple[Tensor, Tensor]


class KeyValueCache:
    """Keys and values [B, H, U, E] that the attentions of a decoder keep from step to step.

    Those of self-attention grow with every step; those of cross-attention are made in the first one and stay.
    """

    def __init__(self) -> None:
        self._grown: dict[nn.Module, KeysValues] = {}
        self._made: dict[nn.Module, KeysValues] = {}

    @property
    def num_tokens(self) -> int:
        """Target tokens that have been read."""
        return max((keys.shape[2] for keys, _ in self._grown.values()), default=0)

    def extend(self, attention: nn.Module, new: KeysValues) -> KeysValues:
        """Keys and values of all tokens, the `new` ones last."""
        if (old := self._grown.get(attention)) is not None:
            new = torch.cat((old[0], new[0]), dim=2), torch.cat((old[1], new[1]), dim=2)
        self._grown[attention] = new
        return new

    def once(self, attention: nn.Module, make: Callable[[], KeysValues]) -> KeysValues:
        """What `make` gave at the first call."""
        if attention not in self._made:
            self._made[attention] = make()
        return self._made[attention]


@dataclass(frozen=True)
class Encoded:
    """What the encoder made of a batch of sources.

    Attributes:
        states: [B, M, D] after the encoder's final norm.
        segment_ids: [B, M]; None: all tokens of a row are one source, without padding.
    """

    states: Tensor
    segment_ids: Tensor | None = None


@dataclass(frozen=True)
class TargetLayout:
    """How the targets of a batch lie: computed once, used by every decoder layer.

    Attributes:
        encoded: what cross-attention sees.
        self_mask: [B or 1, H, T, U] what is added to scores of self-attention: the relative bias, and minus infinity
            where a query does not see a key.
        cross_mask: [B, 1, T, M] bool, True where a target token sees a source token; None: everywhere.
        exit_depths: [B, T] decoder layers after which a token's state stays as it is; None: no token is frozen. Upper
            layers make their keys and values of self-attention from the frozen state, which is what the KV policy
            `fill` does; those of cross-attention are the encoder's and know no depth.
        skipped_layers: [B, L] bool: layers that leave a row as it is; None: no layer does.
        cache: of earlier steps; None: the targets are there as a whole.
    """

    encoded: Encoded
    self_mask: Tensor
    cross_mask: Tensor | None
    exit_depths: Tensor | None = None
    skipped_layers: Tensor | None = None
    cache: KeyValueCache | None = None

    @classmethod
    def build(
        cls,
        bias: RelativeAttentionBias,
        encoded: Encoded,
        num_tokens: int,
        segment_ids: Tensor | None = None,
        exit_depths: Tensor | None = None,
        skipped_layers: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> TargetLayout:
        """Lay out a batch.

        Args:
            bias: the decoder's.
            encoded: the sources.
            num_tokens: T, target tokens that are read now.
            segment_ids: [B, T], see the module; None: all of a row are segment 1.
            exit_depths: [B, T], see the class.
            skipped_layers: [B, L], see the class.
            cache: with what was read before these tokens. It holds one target for each row, so without `segment_ids`.
        """
        if cache is not None and segment_ids is not None:
            raise ValueError("a cache holds one target for each row; packed targets have none")
        device = encoded.states.device
        past = 0 if cache is None else cache.num_tokens
        keys = torch.arange(past + num_tokens, device=device)
        queries = keys[past:]
        seen = keys[None, :] <= queries[:, None]
        if segment_ids is not None:
            seen = (seen & _together(segment_ids, segment_ids))[:, None]
        self_mask = bias(queries, keys).masked_fill(~seen, -torch.inf)
        return cls(encoded, self_mask, _cross_mask(segment_ids, encoded), exit_depths, skipped_layers, cache)

    def cross_keys_values(self, attention: nn.Module, make: Callable[[Tensor], KeysValues]) -> KeysValues:
        """Keys and values of the sources for one layer's cross-attention; with a cache they are made once."""
        if self.cache is None:
            return make(self.encoded.states)
        return self.cache.once(attention, lambda: make(self.encoded.states))


def source_mask(bias: RelativeAttentionBias, num_tokens: int, segment_ids: Tensor | None) -> Tensor:
    """[B or 1, H, M, M] what is added to the encoder's scores; padding sees padding, and nobody else does."""
    positions = torch.arange(num_tokens, device=bias.weight.device)
    scores = bias(positions, positions)
    if segment_ids is None:
        return scores
    return scores.masked_fill(~_together(segment_ids, segment_ids)[:, None], -torch.inf)


def _together(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, T, U] bool: both tokens are of one segment."""
    return queries[:, :, None] == keys[:, None, :]


def _cross_mask(segment_ids: Tensor | None, encoded: Encoded) -> Tensor | None:
    if encoded.segment_ids is None:
        return None
    source = encoded.segment_ids
    seen = (source == 1)[:, None] if segment_ids is None else _together(segment_ids, source)
    # Who sees nothing would become NaN, and NaN passes through masks: zero times NaN is NaN.
    return (seen | ~seen.any(dim=-1, keepdim=True))[:, None]
