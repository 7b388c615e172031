"""Exit heads: from the state after some layer to the state that the unembedding reads.

Legend: B batch, T time, N packed tokens, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import classifier
from offramp.common.exits.config import ExitConfig
from offramp.common.model.block import MLP, Block
from offramp.common.model.config import ModelConfig
from offramp.common.model.layout import BatchLayout
from offramp.common.model.norm import RMSNorm


class HeadShape(Protocol):
    """What a head must know of a family's configuration."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def rms_norm_eps(self) -> float: ...  # noqa: D102


class Adapter(nn.Module):
    """A residual linear map or small MLP that starts as the identity.

    The correction is scaled by the root mean square of the state, so it means the same at every layer although states
    grow with depth.
    """

    def __init__(self, hidden_size: int, width: int | None, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.down_proj = None if width is None else nn.Linear(hidden_size, width, bias=False)
        self.proj = nn.Linear(width or hidden_size, hidden_size, bias=False)
        self.eps = eps

    def forward(self, h: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        x = self.norm(h)
        if self.down_proj is not None:
            x = F.silu(self.down_proj(x))
        exact = torch.promote_types(h.dtype, torch.float32)
        scale = h.to(exact).pow(2).mean(dim=-1, keepdim=True).add(self.eps).sqrt().to(h.dtype)
        return h + self.proj(x) * scale


class ExitClassifier(nn.Linear):
    """Tells from the state after the exit layer how sure the exit is (CALM, section 3.5); at first it knows nothing.

    CALM trains one for all layers. Here each exit has its own, since states grow with depth; one for all is the case
    that all are equal.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    def reset_parameters(self) -> None:
        """Half sure of everything."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """States [N, D] -> confidences [N] fp32 in [0, 1]."""
        return classifier(input, self.weight[0], self.bias)


class ExitHead(nn.Module):
    """One early exit. Its unembedding is its own (`unembed`), or the model's when tied."""

    def __init__(self, config: HeadShape, exits: ExitConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.adapter = Adapter(size, exits.adapter_dim, eps) if exits.head == "adapter" else None
        self.mlp_norm = self.mlp = self.block = None
        if exits.head in ("mlp", "block"):
            if not isinstance(config, ModelConfig):
                raise OfframpError(
                    f"exit head {exits.head!r} is made for decoder-only models; choose bare, final, norm or adapter "
                    "for an encoder-decoder model."
                )
            if exits.head == "mlp":
                self.mlp_norm, self.mlp = RMSNorm(size, eps), MLP(config)
            else:
                self.block = Block(config)
        self.norm = RMSNorm(size, eps) if exits.head not in ("bare", "final") else None
        self.unembed = None if exits.tied else nn.Linear(size, config.vocab_size, bias=False)
        self.classifier = ExitClassifier(size) if exits.classifier else None

    def transform(self, h: Tensor, layout: BatchLayout | None = None) -> Tensor:
        """The state [..., D] that the unembedding reads, before `final`'s shared norm.

        Args:
            h: state after the exit layer; [B, T, D] for `block`, which attends over the sequence.
            layout: needed by `block` only.
        """
        if self.adapter is not None:
            h = self.adapter(h)
        elif self.mlp is not None and self.mlp_norm is not None:
            h = h + self.mlp(self.mlp_norm(h))
        elif self.block is not None:
            if layout is None:
                raise ValueError("an exit head with a block attends over the sequence and needs its layout")
            h = self.block(h, layout)
        return h if self.norm is None else self.norm(h)

    @torch.no_grad()
    def copy_from(
        self, final_norm: RMSNorm, block: nn.Module, last_block: nn.Module, unembedding: Tensor, scale: float
    ) -> None:
        """Start from weights the model already has (EE-Tuning, section 3).

        The norm copies the final norm times `scale`, the feed-forward copies that of the exit layer's `block`, the exit
        block copies the `last_block`, an own unembedding copies the model's [V, D], and an adapter starts as identity.
        """
        if self.norm is not None:
            self.norm.weight.copy_(final_norm.weight * scale)
        if self.adapter is not None:
            self.adapter.norm.weight.fill_(1.0)
            self.adapter.proj.weight.zero_()
        if self.mlp is not None and self.mlp_norm is not None:
            assert isinstance(block, Block)
            self.mlp.load_state_dict(block.mlp.state_dict())
            self.mlp_norm.load_state_dict(block.post_attention_layernorm.state_dict())
        if self.block is not None:
            self.block.load_state_dict(last_block.state_dict())
        if self.unembed is not None:
            self.unembed.weight.copy_(unembedding)
