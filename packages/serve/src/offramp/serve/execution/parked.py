"""Parked rows: newest rows that are not sure at an exit and wait there until enough of them want the layers above.

At small batches a layer takes nearly as long for two rows as for eight, because reading its weights is what takes the
time. So it does not pay to run the deep layers in every iteration for the few rows that stay. With `deep_quorum` these
are put away where they are, and their requests get no token and bring no new row, until a quorum is together. What a
row is given does not depend on when it goes on, so answers stay what they are; they only come later.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from offramp.serve.execution.stored_states import StoredStates


@dataclass
class ParkedRows:
    """Rows of one request that wait at one exit: its newest, and those that were carried along with it.

    Attributes:
        exit_layer: where.
        positions: N, ascending.
        slots: N, where their states after the exit layer are stored.
        waited: iterations that the newest row has waited, at earlier exits too.
    """

    exit_layer: int
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    waited: int = 0


class Parking:
    """The parked rows of all requests, and when they go on.

    Attributes:
        is_open: whether rows are parked at all.
    """

    def __init__(self, quorum: float, max_iterations: int, states: StoredStates) -> None:
        """Start empty.

        Args:
            quorum: share of an iteration's decoding requests that must want the layers above an exit; 0: nobody waits.
            max_iterations: most iterations that a row waits.
            states: what the slots of the rows count.
        """
        self.is_open = quorum > 0
        self._quorum, self._max_iterations, self._states = quorum, max_iterations, states
        self._parked: dict[str, ParkedRows] = {}

    def __len__(self) -> int:
        """Rows parked, of all requests together."""
        return sum(len(rows.positions) for rows in self._parked.values())

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's newest row waits."""
        return request_id in self._parked

    def waiting(self, request_ids: Container[str], exit_layer: int | None = None) -> dict[str, ParkedRows]:
        """What waits of some requests, at one exit or (None) at any."""
        return {
            one: rows
            for one, rows in self._parked.items()
            if exit_layer in (None, rows.exit_layer) and one in request_ids
        }

    def begin(self, request_ids: Container[str]) -> dict[str, ParkedRows]:
        """An iteration begins with some requests: what waits of them, which has then waited once more."""
        waiting = self.waiting(request_ids)
        for rows in waiting.values():
            rows.waited += 1
        return waiting

    def is_due(self, waited: int) -> bool:
        """Whether a row has waited for so many iterations that it must go on."""
        return waited >= self._max_iterations

    def has_quorum(self, num_requests: int, num_decodes: int) -> bool:
        """Whether so many of an iteration's decoding requests are enough to run the layers above an exit."""
        return num_requests >= self._quorum * num_decodes

    def put(self, request_id: str, rows: ParkedRows) -> None:
        """Park the rows of a request."""
        assert request_id not in self._parked, request_id
        self._parked[request_id] = rows

    def take(self, request_id: str) -> ParkedRows:
        """Get the rows of a request that waits, for good, and their slots with them."""
        return self._parked.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is parked of a request."""
        rows = self._parked.pop(request_id, None)
        if rows is not None:
            self._states.forget(rows.slots)
