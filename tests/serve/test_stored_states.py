from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.stored_states import StoredStates


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(1, 90), st.integers(400, 3000)), st.sampled_from(["put", "take", "forget"])),
        max_size=30,
    )
)
def test_rows_come_back_as_they_were_whatever_was_put_and_taken_between(steps: list[tuple[int, str]]) -> None:
    states, kept = StoredStates(), dict[int, torch.Tensor]()
    for number, (count, action) in enumerate(steps):
        if action == "put":
            rows = torch.full((count, 3), float(number)) + torch.arange(count)[:, None] / 100
            slots = states.put(rows)
            assert not kept.keys() & set(slots)
            kept.update(zip(slots, rows, strict=True))
            continue
        some = list(kept)[::2][:count]
        rows = [kept.pop(slot) for slot in some]
        if action == "forget":
            states.forget(some)
        elif some:
            assert torch.equal(states.take(some), torch.stack(rows))
    if kept:
        assert torch.equal(states.take(list(kept)), torch.stack(list(kept.values())))


def test_room_that_was_given_back_is_used_again() -> None:
    states = StoredStates()
    kept = KeptTokens(states)
    slots: set[int] = set()
    for position in range(1000):
        (slot,) = states.put(torch.zeros(1, 3))
        kept.keep("a", 2, position, slot)
        slots.add(slot)
        if position % 5 == 4:
            assert len(kept) == 5
            kept.forget("a")
    assert len(slots) == 5
    assert len(kept) == 0


def test_the_room_of_a_burst_is_given_back_when_nobody_is_left() -> None:
    states = StoredStates()
    slots = states.put(torch.zeros(5000, 3))
    assert states.num_rows >= 5000
    states.forget(slots)
    assert states.num_rows == 1024
    with torch.inference_mode():
        slots = states.put(torch.ones(2000, 3))
        assert torch.equal(states.take(slots[:1000]), torch.ones(1000, 3))
    states.forget(slots[1000:])  # outside of inference, as when a request is cancelled
    assert states.num_rows == 1024
    with torch.inference_mode():
        assert torch.equal(states.take(states.put(torch.ones(2, 3))), torch.ones(2, 3))


def test_the_room_of_a_burst_is_given_back_while_others_go_on() -> None:
    states = StoredStates()
    stays = states.put(torch.arange(5.0)[:, None].expand(5, 3))
    burst = states.put(torch.zeros(20_000, 3))
    late = states.put(torch.full((5, 3), 7.0))  # behind the burst
    states.forget(burst)
    rounds = 0
    while states.num_rows > 1024:
        slots = states.put(torch.zeros(500, 3))
        moved = states.put(states.take(late))  # as a sequence's tokens do that leave again
        states.forget(slots)
        late, rounds = moved, rounds + 1
        assert rounds < 200, states.num_rows
    assert torch.equal(states.take(stays)[:, 0], torch.arange(5.0))
    assert torch.equal(states.take(late), torch.full((5, 3), 7.0))


def test_room_is_not_looked_at_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    states, sizes, look = StoredStates(), list[int](), StoredStates._shrink
    monkeypatch.setattr(StoredStates, "_shrink", lambda self, size: [sizes.append(size), look(self, size)])
    states.put(torch.zeros(4000, 3))  # stays
    for _ in range(100):
        states.forget(states.put(torch.zeros(96, 3)))
    assert sizes == [8000]
    assert states.num_rows == 8000
