"""Tokens that left early and wait to be carried on by a deeper pass of their sequence.

A sequence's kept tokens lie in groups, one for each depth, and the later token never waits deeper than the earlier one:
a pass that goes deeper than some of them takes them along. So what a pass picks up at an exit is one group.

Legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.serve.execution.stored_states import StoredStates


@dataclass
class KeptGroup:
    """Tokens of one sequence that wait at one exit, in order of position.

    Attributes:
        positions: N.
        slots: N, where their states after the exit layer are stored.
    """

    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class KeptTokens:
    """The kept tokens of all requests."""

    def __init__(self, states: StoredStates) -> None:
        """Start empty.

        Args:
            states: what the slots of the tokens count.
        """
        self._states = states
        self._groups: dict[str, dict[int, KeptGroup]] = {}

    def __len__(self) -> int:
        """Tokens kept, of all requests together."""
        return sum(len(group.positions) for groups in self._groups.values() for group in groups.values())

    def keep(self, request_id: str, depth: int, position: int, slot: int) -> None:
        """Put a token away that comes after all those of the request that are kept already."""
        groups = self._groups.setdefault(request_id, {})
        group = groups.get(depth)
        if group is None:
            assert all(depth < other for other in groups), (
                f"{request_id} keeps tokens at {list(groups)}, before {depth}"
            )
            group = groups[depth] = KeptGroup()
        group.positions.append(position)
        group.slots.append(slot)

    def depths(self, request_id: str) -> list[int]:
        """Exits at which tokens of a request wait."""
        return list(self._groups.get(request_id, ()))

    def take(self, request_id: str, depth: int) -> KeptGroup | None:
        """Get the tokens that wait at an exit, for good, and their slots with them; None if there are none."""
        groups = self._groups.get(request_id)
        group = None if groups is None else groups.pop(depth, None)
        if not groups:
            self._groups.pop(request_id, None)
        return group

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept of a request."""
        for group in self._groups.pop(request_id, {}).values():
            self._states.forget(group.slots)
