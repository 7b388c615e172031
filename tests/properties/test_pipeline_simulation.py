"""Whatever stages cost: simulated steps keep their dependencies, and stay within what the papers promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.train.pipeline.schedule import (
    Operation,
    Schedule,
    bubble_capacity,
    cooldown_counts,
    one_f_one_b,
    warmup_counts,
)
from offramp.train.pipeline.simulation import HeadWork, StageWork, Timeline, simulate, time_bound

TOLERANCE = 1e-9
examples = settings(deadline=None, max_examples=60)
seconds = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
head = st.builds(
    HeadWork, seconds, seconds, held=st.just(3.0), working=st.just(9.0), freed=st.sampled_from([0.0, 5.0, 50.0])
)
works = st.lists(
    st.builds(
        StageWork,
        forward=seconds,
        backward=seconds,
        held=st.just(100.0),
        working=st.sampled_from([0.0, 30.0]),
        ending=st.sampled_from([0.0, 120.0]),
        heads=st.lists(head, max_size=3).map(tuple),
        deferred=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
micro_batches = st.integers(1, 12)


@st.composite
def filled_schedules(draw: st.DrawFn, stages: int) -> Schedule:
    """1F1B, with anything from nothing to all that fits in the bubbles."""
    ratio = draw(st.floats(0.2, 4.0))
    capacity = bubble_capacity(stages, ratio)
    exit_stages = draw(st.sets(st.integers(0, stages - 1)))
    early = warmup_counts(stages, draw(st.integers(0, capacity)), ratio, sorted(exit_stages))
    late = cooldown_counts(stages, draw(st.integers(0, capacity)), ratio)
    return one_f_one_b(stages, draw(micro_batches), early, late)


def when(timeline: Timeline) -> list[dict[Operation, tuple[float, float]]]:
    return [
        dict(zip(operations, spans, strict=True))
        for operations, spans in zip(timeline.schedule.operations, timeline.spans, strict=True)
    ]


@examples
@given(works, st.data(), st.sampled_from([0.0, 0.01, 1.0]))
def test_dependencies_hold_and_no_stage_does_two_things_at_once(
    works: list[StageWork], data: st.DataObject, transfer: float
) -> None:
    timeline = simulate(data.draw(filled_schedules(len(works))), works, transfer)
    times = when(timeline)
    for stage, operations in enumerate(timeline.schedule.operations):
        assert len(set(operations)) == len(operations)
        before = 0.0
        for (kind, micro), (start, end) in times[stage].items():
            ready = [before]
            if kind == "forward" and stage > 0:
                ready.append(times[stage - 1][Operation(kind, micro)][1] + transfer)
            if kind == "backward":
                assert start >= times[stage][Operation("forward", micro)][1]
                above = times[stage + 1].get(Operation(kind, micro)) if stage + 1 < len(works) else None
                if above is not None:
                    ready.append(above[1] + transfer)
                elif 0 <= micro < timeline.schedule.micro_batches:
                    assert stage + 1 == len(works), "a whole micro-batch goes back through all stages"
            assert start == max(ready), "neither before it can, nor later"
            assert end == start + works[stage].seconds(kind)
            before = end


@examples
@given(works, micro_batches)
def test_in_flight_are_as_many_as_there_are_stages_above(works: list[StageWork], count: int) -> None:
    timeline = simulate(one_f_one_b(len(works), count), works)
    for stage, (work, peak) in enumerate(zip(works, timeline.peaks, strict=True)):
        assert peak.in_flight == min(len(works) - stage, count)
        if not work.heads:
            assert peak.logits == 0
        elif work.deferred:
            assert peak.logits == 1
        else:
            assert peak.logits == peak.in_flight * len(work.heads)
        # By hand: what waits, and the largest of the layers at work, the embedding's end, and one head at work.
        waiting = work.held + (0.0 if work.deferred else 3.0 * len(work.heads))
        at_work = max([9.0 - head.freed if work.deferred else 6.0 for head in work.heads], default=0.0)
        on_top = max(work.working, work.ending - work.held, at_work)
        assert peak.bytes == pytest.approx(peak.in_flight * waiting + on_top)


@examples
@given(st.integers(1, 8), micro_batches, seconds, seconds)
def test_equal_stages_take_the_closed_formula(stages: int, count: int, forward: float, backward: float) -> None:
    timeline = simulate(one_f_one_b(stages, count), [StageWork(forward, backward)] * stages)
    assert timeline.seconds == pytest.approx((count + stages - 1) * (forward + backward))
    if forward + backward > 0:
        assert timeline.bubble_share == pytest.approx((stages - 1) / (count + stages - 1))


heads_of_ratio_two = st.lists(st.floats(0.0, 3.0).map(lambda t: HeadWork(t, 2 * t, 0.0, 0.0)), max_size=3).map(tuple)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(heads_of_ratio_two, min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    micro_batches,
    st.sampled_from([0.0, 0.01, 1.0]),
    st.booleans(),
)
def test_a_step_is_within_the_bound(
    heads: list[tuple[HeadWork, ...]], layers: list[int], count: int, transfer: float, deferred: bool
) -> None:
    # The paper's case: equal backbones and any exits, deferred or not; and stages of any length, exits not deferred.
    for lengths in [[1] * 6] if deferred else [[1] * 6, layers]:
        works = [StageWork(n, 2.0 * n, heads=own, deferred=deferred) for n, own in zip(lengths, heads, strict=False)]
        timeline = simulate(one_f_one_b(len(works), count), works, transfer)
        assert timeline.seconds <= time_bound(works, count, transfer) * (1 + TOLERANCE)


@examples
@given(works, micro_batches, st.sampled_from([0.0, 0.01, 1.0]))
def test_any_step_lies_between_its_slowest_stage_and_equal_stages(
    works: list[StageWork], count: int, transfer: float
) -> None:
    timeline = simulate(one_f_one_b(len(works), count), works, transfer)
    assert timeline.seconds >= count * max(work.total for work in works) * (1 - TOLERANCE)
    longest = sum(max(work.seconds(kind) for work in works) + transfer for kind in ("forward", "backward"))
    assert timeline.seconds <= (count + len(works) - 1) * longest * (1 + TOLERANCE)


def test_the_bound_supposes_stages_alike_but_for_their_exits() -> None:
    works = [StageWork(f, b) for f, b in ((2.0, 0.0), (0.0, 2.0), (1.0, 0.0), (0.0, 1.0))]
    assert (simulate(one_f_one_b(4, 3), works).seconds, time_bound(works, 3)) == (12.0, 11.0)


def test_the_bound_is_the_papers() -> None:
    # f_IN + b_IN + (P - 1)(f_BB + b_BB) + sum_{i<P} N_i (f_EE + b_EE) + M max_i {...}, written out.
    f_in, b_in, f_bb, b_bb, f_ee, b_ee, f_fe, b_fe = 0.1, 0.2, 1.0, 2.0, 0.3, 0.6, 0.4, 0.8
    exits, count = (0, 2, 1, 0), 7
    stages = []
    for index, number in enumerate(exits):
        heads = (HeadWork(f_ee, b_ee, 0, 0),) * number + ((HeadWork(f_fe, b_fe, 0, 0),) if index == 3 else ())
        first = index == 0
        stages.append(StageWork(f_bb + first * f_in, b_bb + first * b_in, heads=heads))
    slowest = max(
        f_bb + b_bb + (i == 0) * (f_in + b_in) + (i == 3) * (f_fe + b_fe) + exits[i] * (f_ee + b_ee) for i in range(4)
    )
    expected = f_in + b_in + 3 * (f_bb + b_bb) + sum(exits[:3]) * (f_ee + b_ee) + count * slowest
    assert time_bound(stages, count) == pytest.approx(expected)


@examples
@given(
    st.integers(3, 8), st.integers(0, 20), st.floats(0.5, 3.0), st.floats(0.05, 0.5), st.integers(0, 3), st.booleans()
)
def test_minimal_exits_on_middle_stages_add_only_their_own_time(
    stages: int, more: int, ratio: float, small: float, between: int, deferred: bool
) -> None:
    # Knowl 3 of EE-LLM: k middle exits, no dearer than the final one, add k (f_EE + b_EE).
    head = HeadWork(small, 2 * small, held=1.0, working=1.0)
    plain = [StageWork(1.0, ratio, heads=(head,) if s == stages - 1 else (), deferred=deferred) for s in range(stages)]
    chosen = list(range(1, stages - 1))[: between + 1]
    exits = [replace(work, heads=(head,)) if s in chosen else work for s, work in enumerate(plain)]
    schedule = one_f_one_b(stages, stages + more)
    added = simulate(schedule, exits).seconds - simulate(schedule, plain).seconds
    assert -TOLERANCE <= added <= len(chosen) * 3 * small + TOLERANCE


@examples
@given(st.integers(2, 8), micro_batches, st.floats(0.25, 4.0))
def test_filled_bubbles_make_no_step_of_equal_stages_longer(stages: int, count: int, ratio: float) -> None:
    works = [StageWork(1.0, ratio)] * stages
    capacity = bubble_capacity(stages, ratio)
    assert capacity == int((stages - 1) / (1.0 / ratio + 1.0) + 1e-9), "the paper's form of K"
    early = warmup_counts(stages, capacity, ratio, range(stages))
    late = cooldown_counts(stages, capacity, ratio)
    assert early == tuple(max(capacity - s, 0) for s in range(stages)), "the paper: i goes through K + 1 - i stages"
    for index in range(1, capacity + 1):
        reached = int(stages - index * (1.0 / ratio + 1.0) + 1e-9)
        assert sum(n >= index for n in late) == max(reached, 0), (
            "the paper: i comes back through P - i (f/b + 1) stages"
        )
    # A full warm-up has all in flight before anything comes back, which takes as many micro-batches as stages.
    count = max(count, stages)
    plain = simulate(one_f_one_b(stages, count), works)
    both = simulate(one_f_one_b(stages, count, early, late), works)
    assert both.seconds == pytest.approx(plain.seconds)
    if capacity:
        assert both.bubble_share < plain.bubble_share
        more = one_f_one_b(stages, count, cooldown=(capacity + 1,) * stages)
        assert simulate(more, works).seconds > plain.seconds


def test_the_counts_that_the_paper_names() -> None:
    assert bubble_capacity(4, 2.0) == 2
    assert warmup_counts(4, 2, 2.0, [0, 1, 2, 3]) == (2, 1, 0, 0)
    assert cooldown_counts(4, 2, 2.0) == (0, 0, 1, 2)


def test_inserted_micro_batches_go_no_further_than_the_last_exit() -> None:
    assert warmup_counts(6, 3, 2.0, [0, 1, 2]) == (3, 2, 1, 0, 0, 0)
    assert warmup_counts(6, 3, 2.0, [0]) == (3, 0, 0, 0, 0, 0)
    assert warmup_counts(6, 3, 2.0, [3, 4, 5]) == (0, 0, 0, 0, 0, 0)


@examples
@given(st.integers(2, 8), st.integers(1, 12), st.floats(1.0, 100.0), st.floats(0.0, 1.0))
def test_deferred_exits_in_the_middle_leave_every_peak_where_it_was(
    stages: int, count: int, held: float, share: float
) -> None:
    # EE-LLM, section 3.2: no exit on the first stage, and logits no larger than a stage's activations. There it is the
    # largest stage that stays as it was; here an exit that reads what its stage received comes last, so all do.
    head = HeadWork(0.1, 0.2, held=share * held, working=share * held, freed=held)
    plain = [StageWork(1.0, 2.0, held) for _ in range(stages)]
    deferred = [work if s == 0 else replace(work, heads=(head,)) for s, work in enumerate(plain)]
    forward = [replace(work, deferred=False) for work in deferred]
    above = [replace(work, heads=tuple(one._replace(freed=0.0) for one in work.heads)) for work in deferred]
    schedule = one_f_one_b(stages, count)
    before, after, naive, first = (simulate(schedule, works).peaks for works in (plain, deferred, forward, above))
    if count >= stages:
        assert max(peak.bytes for peak in first) == max(peak.bytes for peak in before)
    for old, new, kept, at_the_top in zip(before, after, naive, first, strict=True):
        assert new.in_flight == old.in_flight
        assert new.bytes == pytest.approx(old.bytes)
        assert at_the_top.bytes <= old.bytes + share * held + TOLERANCE, "one exit's logits at most"
        assert at_the_top.bytes <= kept.bytes + TOLERANCE


@examples
@given(works, micro_batches)
def test_deferral_changes_neither_the_work_nor_the_bound(works: list[StageWork], count: int) -> None:
    early, late = ([replace(work, deferred=deferred) for work in works] for deferred in (False, True))
    assert time_bound(early, count) == pytest.approx(time_bound(late, count))
    schedule = one_f_one_b(len(works), count)
    assert sum(simulate(schedule, early).busy) == pytest.approx(sum(simulate(schedule, late).busy))


def test_a_schedule_that_waits_for_itself_is_a_fault() -> None:
    forward, backward = Operation("forward", 0), Operation("backward", 0)
    with pytest.raises(ValueError, match="waits for itself"):
        simulate(Schedule(1, ((backward, forward), (forward, backward))), [StageWork(1.0, 1.0)] * 2)
