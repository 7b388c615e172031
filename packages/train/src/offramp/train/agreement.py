"""How often an early exit says what the final exit says: agreement, token by token. No framework in here.

Exits of one batch may lie in different processes (pipeline stages). What each of them says is a token id per position,
four bytes beside states of thousands, so the ids of the final exit are handed to whoever holds other exits.

Legend: B batch, T time, N selected tokens, P positions of all micro-batches of a step, X exits.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_ASKED = -1
"""In place of a token where an exit was not asked: prompts, padding, and tokens frozen below it."""


class Predictions:
    """The most probable token of each exit at every position of a step's micro-batches, in their order."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[Tensor]] = {}

    def add(self, layer: int, mask: Tensor, predicted: Tensor) -> None:
        """One micro-batch.

        Args:
            layer: of the exit.
            mask: [B, T] bool, the N positions it was asked at.
            predicted: [N] token ids.
        """
        tokens = torch.full(mask.shape, NOT_ASKED, dtype=torch.int32, device=mask.device)
        tokens[mask] = predicted.int()
        self._tokens.setdefault(layer, []).append(tokens.flatten())

    def of(self, layer: int) -> Tensor | None:
        """[P] int32 token ids, `NOT_ASKED` where there is none; None if the exit has said nothing at all."""
        tokens = self._tokens.get(layer)
        return None if tokens is None else torch.cat(tokens)

    def by_row(self, layers: tuple[int, ...], labels: Tensor) -> Tensor:
        """[X, B] what each exit says in a row that asks it at one position; `NOT_ASKED` where it was not asked.

        Args:
            layers: X exits.
            labels: [B, T] of all micro-batches, read for their shape and device only.
        """
        found = torch.full((len(layers), *labels.shape), NOT_ASKED, device=labels.device)
        for place, layer in enumerate(layers):
            tokens = self.of(layer)
            if tokens is not None:
                found[place] = tokens.view(labels.shape)
        return found.amax(dim=2)

    def compare(self, layers: tuple[int, ...], final: Tensor | None) -> Tensor:
        """[2, X] float64: positions where an exit says the same as the final one, and those where both were asked.

        Args:
            layers: X exits; those that are not here count nothing.
            final: [P] what the final exit says; None counts nothing.
        """
        counts = torch.zeros(2, len(layers), dtype=torch.float64)
        if final is None:
            return counts
        for index, layer in enumerate(layers):
            tokens = self.of(layer)
            if tokens is not None:
                both = (tokens != NOT_ASKED) & (final != NOT_ASKED)
                counts = counts.to(final.device)
                counts[:, index] = torch.stack((((tokens == final) & both).sum(), both.sum()))
        return counts
