"""Where the time of an iteration goes: a lap clock with named parts, cheap enough to stay on.

    clock.start()
    ...; clock.lap("scheduling")
    ...; seconds = clock.lap("layers")
    parts = clock.stop()

Every lap books the time since the last one, so the parts of an iteration add up to all of it and nothing is left out.
A lap costs one reading of the clock and one addition (about 0.1 microseconds). It takes the time of the host: work that
a GPU has only been told to do is booked where the host waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, get_args

Part = Literal["scheduling", "encoder", "layers", "exit_test", "fill", "head", "sampling", "detokenising", "other"]
"""`scheduling`: choosing rows, and taking tokens in. `encoder`: reading sources, and the keys and values of
cross-attention. `layers`: the backbone, and blocks of exit heads, attention
included: one operation runs a whole segment and does not tell it apart. `exit_test`: confidence and the decision who
leaves. `fill`: keys and values of skipped layers. `head`: logits, or the best token without them, of rows that have
left. `sampling`: tokens out of logits, judging drafts included. `detokenising`: text out of tokens. `other`: building
rows, regrouping, embedding, outputs."""

PARTS: Final[tuple[Part, ...]] = get_args(Part)


class IterationClock:
    """Laps of one iteration after the other. Not thread-safe: the engine's thread owns it.

    Attributes:
        parts: part -> seconds of the iteration under way.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Make a clock that stands.

        Args:
            clock: seconds, never going back.
        """
        self._clock = clock
        self.parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._last = clock()

    def start(self) -> None:
        """Begin an iteration: the time before now belongs to none."""
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._last = self._clock()

    def lap(self, part: Part) -> float:
        """Book the time since the last lap (or the start) to a part; its seconds."""
        now = self._clock()
        seconds = now - self._last
        self.parts[part] += seconds
        self._last = now
        return seconds

    def stop(self) -> dict[Part, float]:
        """End the iteration: what no lap has booked is `other`. The seconds of all parts, a dictionary of their own."""
        self.lap("other")
        return self.parts
