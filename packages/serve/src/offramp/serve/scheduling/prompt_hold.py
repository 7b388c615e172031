"""When waiting prompts start, if deep passes are put off (`EngineConfig.deep_quorum`).

The rows of a prompt run all layers, so an iteration with a prompt is a deep pass for everybody. If answers are short,
nearly every iteration would have one, and no row would ever be parked for long. So prompts start together with a deep
pass that is coming anyway: when they, the parked rows, and as many more as were parked in the last iteration make the
quorum. They wait for at most as many iterations as a parked row does, and not at all while nobody is being parked: then
no pass is coming that is worth waiting for.
"""

from __future__ import annotations

from collections.abc import Collection

from offramp.serve.scheduling.sequence import SequenceState

_UNPARKED_IN_A_ROW = 2
"""Iterations without a parked row, one after the other, that show that nobody is being parked."""


class PromptHold:
    """Whether prompts wait for the next deep pass."""

    def __init__(self, quorum: float, max_iterations: int) -> None:
        """Start with nobody parked.

        Args:
            quorum: share of the decoding requests; 0: prompts never wait.
            max_iterations: most iterations in a row in which prompts are held.
        """
        self._quorum, self._max_iterations = quorum, max_iterations
        self._parked: frozenset[str] = frozenset()
        self._num_newly_parked = 0
        self._num_held = 0
        self._num_unparked = _UNPARKED_IN_A_ROW

    def update(self, parked: Collection[str], *, has_prompts: bool) -> None:
        """An iteration has ended.

        Args:
            parked: requests whose newest rows are parked.
            has_prompts: whether it had rows of prompts; nobody is parked then, which shows nothing.
        """
        names = frozenset(parked)
        if not has_prompts:
            self._num_unparked = 0 if names else self._num_unparked + 1
        self._num_newly_parked = len(names - self._parked)
        self._parked = names

    def holds(self, num_startable: int, running: Collection[SequenceState]) -> bool:
        """Whether prompts go on waiting in the iteration that is being scheduled.

        Args:
            num_startable: waiting requests for which there are seats.
            running: requests that have one.
        """
        holds = self._quorum > 0 and num_startable > 0 and self._is_early(num_startable, running)
        self._num_held = self._num_held + 1 if holds else 0
        return holds

    def _is_early(self, num_startable: int, running: Collection[SequenceState]) -> bool:
        if not running or self._num_held >= self._max_iterations or self._num_unparked >= _UNPARKED_IN_A_ROW:
            return False
        if any(sequence.request.runs_full_depth or not sequence.decodes for sequence in running):
            return False  # this iteration is a deep pass
        num_parked = sum(sequence.request.request_id in self._parked for sequence in running)
        return num_startable + num_parked + self._num_newly_parked < self._quorum * len(running)
