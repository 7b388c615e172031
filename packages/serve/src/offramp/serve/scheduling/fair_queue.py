"""The waiting queue: priorities first, and clients take turns within a priority.

Turns are those of deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), counted in tokens: a client whose turn it
is may start requests as long as its credit covers them, then it gets a quantum more and goes to the end of the round.
So over time each client that has something to ask gets an equal share of tokens, whether it asks for them in many small
requests or in few large ones, and however many it has queued. A request costs the tokens it may need, source, prompt
and `max_tokens`; what it turns out not to use is given back to its client.

Everything takes constant time, but for the rounds that a request larger than the quantum waits for: at most its cost
divided by the quantum.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from offramp.serve.request.request import Request


@dataclass
class _Client:
    """One client's requests of one priority that wait, first come first, and the tokens it may start now."""

    credit: int
    requests: OrderedDict[str, Request] = field(default_factory=OrderedDict)


class FairQueue:
    """Requests that wait, in the order in which they should start.

    Requests of a priority wait until those of every smaller number have started: that they can starve is what a
    priority means.
    """

    def __init__(self, quantum: int) -> None:
        """Start empty.

        Args:
            quantum: tokens that a client gets per turn.
        """
        assert quantum >= 1, quantum
        self._quantum = quantum
        self._rounds: dict[int, OrderedDict[str, _Client]] = {}  # priority -> clients, whose turn it is first
        self._places: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def push(self, request: Request) -> None:
        """Put a request behind those of its client."""
        assert request.request_id not in self._places, request.request_id
        self._places[request.request_id] = request
        clients = self._rounds.setdefault(request.priority, OrderedDict())
        client = clients.get(request.client)
        if client is None:
            clients[request.client] = client = _Client(self._quantum)
        client.requests[request.request_id] = request

    def head(self) -> Request | None:
        """The request that should start next. It stays the same until it is removed or a more urgent one comes."""
        if not self._rounds:
            return None
        clients = self._rounds[min(self._rounds)]
        while True:
            name, client = next(iter(clients.items()))
            request = next(iter(client.requests.values()))
            if client.credit >= _cost(request):
                return request
            client.credit += self._quantum
            clients.move_to_end(name)

    def pop(self) -> Request:
        """Remove the head; its client pays for it."""
        request = self.head()
        assert request is not None, "nothing waits"
        self._rounds[request.priority][request.client].credit -= _cost(request)
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> Request | None:
        """Take a request out without paying; None if it does not wait here."""
        request = self._places.pop(request_id, None)
        if request is None:
            return None
        clients = self._rounds[request.priority]
        client = clients[request.client]
        del client.requests[request_id]
        # Credit is not saved up by who asks for nothing.
        if not client.requests:
            del clients[request.client]
        if not clients:
            del self._rounds[request.priority]
        return request

    def refund(self, request: Request, num_tokens: int) -> None:
        """Give a client back what one of its requests paid for and did not use."""
        client = self._rounds.get(request.priority, {}).get(request.client)
        if client is not None:
            client.credit += num_tokens


def _cost(request: Request) -> int:
    """Tokens that a request may need."""
    return request.num_source_tokens + request.max_total_tokens
