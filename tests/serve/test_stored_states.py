from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.stored_states import StoredStates


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["put", "take", "forget"])), max_size=30))
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
