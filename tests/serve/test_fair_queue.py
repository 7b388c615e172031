from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.requests import make_request
from offramp.serve.scheduling.fair_queue import FairQueue


def push(queue: FairQueue, name: str, cost: int, client: str = "", priority: int = 0) -> None:
    queue.push(make_request(name, prompt=cost - 1, max_tokens=1, client=client, priority=priority))


def drain(queue: FairQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_one_client_is_first_come_first_served() -> None:
    queue = FairQueue(quantum=10)
    for name, cost in (("a", 50), ("b", 2), ("c", 20)):
        push(queue, name, cost)
    assert drain(queue) == ["a", "b", "c"]
    assert queue.head() is None


def test_many_requests_do_not_bring_more_turns() -> None:
    queue = FairQueue(quantum=10)
    for index in range(6):
        push(queue, f"greedy{index}", 10, "greedy")
    push(queue, "modest", 10, "modest")
    assert drain(queue)[:2] == ["greedy0", "modest"]


def test_turns_are_counted_in_tokens() -> None:
    queue = FairQueue(quantum=20)
    for index in range(3):
        push(queue, f"large{index}", 20, "large")
    for index in range(12):
        push(queue, f"small{index}", 5, "small")
    assert [name.rstrip("0123456789") for name in drain(queue)] == (["large"] + ["small"] * 4) * 3


def test_a_request_larger_than_the_quantum_waits_for_its_rounds() -> None:
    queue = FairQueue(quantum=10)
    push(queue, "large", 30, "a")
    for index in range(4):
        push(queue, f"small{index}", 10, "b")
    assert drain(queue) == ["small0", "small1", "large", "small2", "small3"]


def test_smaller_numbers_go_first_whatever_the_turn() -> None:
    queue = FairQueue(quantum=10)
    push(queue, "late", 5, "a", priority=3)
    push(queue, "usual", 5, "a")
    push(queue, "urgent", 5, "b", priority=-1)
    assert drain(queue) == ["urgent", "usual", "late"]


def test_the_head_stays_until_it_goes_or_something_more_urgent_comes() -> None:
    queue = FairQueue(quantum=10)
    push(queue, "a", 10, "one")
    assert queue.head() is queue.head()
    push(queue, "b", 10, "two")
    head = queue.head()
    assert head is not None
    assert head.request_id == "a"
    push(queue, "c", 10, "two", priority=-1)
    head = queue.head()
    assert head is not None
    assert head.request_id == "c"


def test_removing_costs_nothing_and_leaves_nothing() -> None:
    queue = FairQueue(quantum=10)
    push(queue, "a1", 10, "a")
    push(queue, "a2", 10, "a")
    push(queue, "b1", 10, "b")
    assert "a1" in queue
    removed = queue.remove("a1")
    assert removed is not None
    assert removed.request_id == "a1"
    assert queue.remove("a1") is None
    assert "a1" not in queue
    assert drain(queue) == ["a2", "b1"]
    assert len(queue) == 0


def test_what_was_not_used_is_given_back() -> None:
    queue = FairQueue(quantum=10)
    for index in range(3):
        push(queue, f"a{index}", 10, "a")
        push(queue, f"b{index}", 10, "b")
    first = queue.pop()
    queue.refund(first, 10)
    assert drain(queue) == ["a1", "b0", "a2", "b1", "b2"]
    queue.refund(first, 10)  # nobody to give it to


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.lists(st.integers(2, 40), min_size=12, max_size=12), min_size=2, max_size=4),
    quantum=st.integers(1, 50),
)
def test_clients_with_work_get_equal_shares(costs: list[list[int]], quantum: int) -> None:
    queue = FairQueue(quantum)
    for client, sizes in enumerate(costs):
        for index, cost in enumerate(sizes):
            push(queue, f"{client}/{index}", cost, str(client))
    served: Counter[str] = Counter({str(client): 0 for client in range(len(costs))})
    left = {str(client): len(sizes) for client, sizes in enumerate(costs)}
    orders: dict[str, list[int]] = {client: [] for client in served}
    while all(left.values()):
        request = queue.pop()
        served[request.client] += request.max_total_tokens
        left[request.client] -= 1
        orders[request.client].append(int(request.request_id.split("/")[1]))
        # Shreedhar and Varghese, theorem 2: never further apart than a quantum and twice the largest request, and here
        # each client's first quantum may differ by one turn.
        assert max(served.values()) - min(served.values()) <= 2 * quantum + 2 * 40
    for order in orders.values():
        assert order == list(range(len(order)))


def test_an_empty_queue_cannot_be_popped() -> None:
    with pytest.raises(AssertionError, match="nothing waits"):
        FairQueue(1).pop()
