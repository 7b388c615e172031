"""States of tokens that left early and wait to be carried on by a deeper pass of their sequence.

A sequence's kept tokens lie in groups, one for each depth, and the later token never waits deeper than the earlier one:
a pass that goes deeper than some of them takes them along. So what a pass picks up at an exit is one group.

Legend: N tokens, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptGroup:
    """Tokens of one sequence that wait at one exit, in order of position.

    Attributes:
        positions: [N] int64.
        states: [N, D] after the exit layer.
    """

    positions: Tensor
    states: Tensor


class KeptTokens:
    """The kept tokens of all requests."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, list[KeptGroup]]] = {}

    def __len__(self) -> int:
        """Tokens kept, of all requests together."""
        return sum(
            len(part.positions) for groups in self._groups.values() for parts in groups.values() for part in parts
        )

    def keep(self, request_id: str, depth: int, positions: Tensor, states: Tensor) -> None:
        """Put tokens [N] away that come after all those of the request that are kept already."""
        groups = self._groups.setdefault(request_id, {})
        assert all(depth <= other for other in groups), f"{request_id} keeps tokens at {list(groups)}, not to {depth}"
        groups.setdefault(depth, []).append(KeptGroup(positions, states))

    def depths(self, request_id: str) -> list[int]:
        """Exits at which tokens of a request wait."""
        return list(self._groups.get(request_id, ()))

    def take(self, request_id: str, depth: int) -> KeptGroup | None:
        """Get the tokens that wait at an exit, for good; None if there are none."""
        groups = self._groups.get(request_id)
        parts = None if groups is None else groups.pop(depth, None)
        if groups is None or parts is None:
            return None
        if not groups:
            del self._groups[request_id]
        if len(parts) == 1:
            return parts[0]
        return KeptGroup(torch.cat([part.positions for part in parts]), torch.cat([part.states for part in parts]))

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept of a request."""
        self._groups.pop(request_id, None)
