"""Who starts next: requests that were preempted, by rank, and new ones, whose clients take turns (`fair_queue`)."""

from __future__ import annotations

import itertools
from bisect import insort

from offramp.serve.request.request import Request
from offramp.serve.scheduling.fair_queue import FairQueue
from offramp.serve.scheduling.sequence import SequenceState


class AdmissionQueue:
    """Requests without a seat. Nobody overtakes the head."""

    def __init__(self, quantum: int) -> None:
        """Start empty.

        Args:
            quantum: tokens that a client gets per turn.
        """
        self._new = FairQueue(quantum)
        self._preempted: list[SequenceState] = []  # by rank
        self._admissions = itertools.count()

    def __len__(self) -> int:
        return len(self._new) + len(self._preempted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._new or self._find(request_id) is not None

    @property
    def num_new(self) -> int:
        """Requests that have never had a seat."""
        return len(self._new)

    def push(self, request: Request) -> None:
        """Put a new request behind those of its client."""
        self._new.push(request)

    def put_back(self, sequence: SequenceState) -> None:
        """Let a sequence that lost its seat wait for another one."""
        insort(self._preempted, sequence, key=lambda other: other.rank)

    def head(self) -> SequenceState | None:
        """Who should start next. At equal priority those go first who have run before."""
        request = self._new.head()
        if self._preempted and (request is None or self._preempted[0].request.priority <= request.priority):
            return self._preempted[0]
        return None if request is None else SequenceState(request)

    def pop(self, head: SequenceState) -> None:
        """Remove the head, which gets a seat; it has its rank from now on, and its client has paid for it."""
        if self._preempted and self._preempted[0] is head:
            del self._preempted[0]
        else:
            popped = self._new.pop()
            assert popped is head.request, "not the head"
            head.order = next(self._admissions)

    def remove(self, request_id: str) -> Request | None:
        """Take out a request that will not run (again); None if it does not wait here."""
        request = self._new.remove(request_id)
        sequence = self._find(request_id)
        if sequence is not None:
            self._preempted.remove(sequence)
            request = sequence.request
            self.refund(request)
        return request

    def refund(self, request: Request) -> None:
        """Give the client of a request that ends what it paid for and did not use."""
        self._new.refund(request, request.max_total_tokens - request.num_tokens)

    def _find(self, request_id: str) -> SequenceState | None:
        return next((one for one in self._preempted if one.request.request_id == request_id), None)
