from __future__ import annotations

import itertools

from offramp.serve.measures.iteration_clock import PARTS, IterationClock


def test_the_parts_of_an_iteration_add_up_to_all_of_it() -> None:
    ticks = itertools.count()
    clock = IterationClock(lambda: float(next(ticks) ** 2))  # no two laps are equally long
    clock.start()  # 1
    assert clock.lap("layers") == 4 - 1
    assert clock.lap("head") == 9 - 4
    assert clock.lap("layers") == 16 - 9
    parts = clock.stop()  # 25
    assert parts == {**dict.fromkeys(PARTS, 0.0), "layers": 10, "head": 5, "other": 9}
    assert sum(parts.values()) == 25 - 1


def test_an_iteration_knows_nothing_of_the_one_before_or_of_the_time_between() -> None:
    now = [0.0]
    clock = IterationClock(lambda: now[0])
    clock.start()
    now[0] = 1.0
    first = clock.stop()
    now[0] = 100.0
    clock.start()
    now[0] = 102.0
    clock.lap("fill")
    assert clock.stop()["fill"] == 2
    assert first["other"] == 1
    assert first["fill"] == 0
