from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offramp.train.data.packing import FirstFit, collate, plan_rows
from offramp.train.data.tokenize import Example

lengths_and_capacity = st.integers(1, 24).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


@given(lengths_and_capacity, st.booleans())
def test_every_example_lies_in_exactly_one_row_that_holds_it(case: tuple[list[int], int], pack: bool) -> None:
    lengths, capacity = case
    rows = plan_rows(lengths, range(len(lengths)), capacity, pack)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[index] for index in row) <= capacity for row in rows)
    if pack and len(rows) > 1:
        # Two rows that could be one would both have been open; only the bound on open rows excuses them.
        assert sum(lengths) > capacity
    assert rows == plan_rows(lengths, range(len(lengths)), capacity, pack)


def test_few_open_rows_bound_the_memory_of_a_stream() -> None:
    packer: FirstFit[int] = FirstFit(10, open_rows=2)
    assert [packer.add(i, 6) for i in range(4)] == [None, None, [0], [1]]
    assert packer.add(4, 4) == [2, 4]
    assert packer.flush() == [[3]]
    assert packer.flush() == []


def test_collated_segments_are_examples_and_padding_is_a_segment_of_its_own() -> None:
    batch = collate([[Example([5, 6], [6, 7]), Example([8], [-100])], [], [Example([1] * 5, [2] * 5)]], 5, pad_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 8, 9, 9], [9] * 5, [1] * 5]
    assert batch.labels.tolist() == [[6, 7, -100, -100, -100], [-100] * 5, [2] * 5]
    assert batch.segment_ids.tolist() == [[0, 0, 1, 2, 2], [0] * 5, [0] * 5]
    assert {tensor.dtype for tensor in batch} == {torch.int64}
    assert batch.num_rows == 3
    assert int(batch.num_trained_tokens()) == 7
    assert torch.equal(batch.rows(1, 3).labels, batch.labels[1:])
