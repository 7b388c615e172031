"""A pipeline as its first stage sees it: iterations go in, and what their rows predict comes back, in any order.

Legend: I requests of the iteration, S stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.devices import on_device
from offramp.serve.execution.departures import Departure
from offramp.serve.execution.exit_test import RequestExits
from offramp.serve.pipeline.messages import Kind, answer_of, decode, encode, plan_message, rule_message
from offramp.serve.pipeline.plan import NO_RULE, make_plan
from offramp.serve.pipeline.stage import Stage
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.scheduling.scheduler_output import Phase, SchedulerOutput


class LaterStages(Protocol):
    """Stages 2 .. S, which take messages in order and send messages back."""

    @property
    def is_lost(self) -> bool:
        """Whether one of them is known to have ended."""
        ...

    def send(self, message: bytes) -> None:
        """Sends a message to stage 2.

        Raises:
            OfframpError: a stage has ended.
        """
        ...

    def receive(self, *, wait: bool) -> Sequence[bytes]:
        """What the stages have sent back since the last call; with `wait` not before there is something.

        Raises:
            OfframpError: a stage has ended.
        """
        ...


class Pipeline:
    """Runs iterations through all stages, the first of them itself.

    Attributes:
        first: stage 1.
    """

    def __init__(self, first: Stage, num_stages: int, later: LaterStages | None) -> None:
        """Join stages.

        Args:
            first: stage 1.
            num_stages: S.
            later: the others; None where S is 1.
        """
        assert (later is None) == (num_stages == 1), "later stages and their number belong together"
        self.first = first
        self._num_stages, self._later = num_stages, later
        self._rules: dict[tuple[Measure, tuple[int, ...] | None, bool], int] = {}
        self._under_way: set[int] = set()
        self._known: deque[tuple[int, Sequence[Departure]]] = deque()

    @property
    def num_under_way(self) -> int:
        """Iterations that have not left the last stage."""
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may begin: one for each stage is under way at most, and one that waits."""
        return self.num_under_way <= self._num_stages

    @property
    def is_lost(self) -> bool:
        """Whether a stage is known to have ended: whatever is asked next raises."""
        return self._later is not None and self._later.is_lost

    def submit(self, output: SchedulerOutput, exits: Sequence[RequestExits | None], uses: Sequence[LogitsUse]) -> None:
        """Begin an iteration: run it through the first stage, and send it on.

        Args:
            output: what to compute; not empty.
            exits: for each request, the exits its generated tokens may take where they are sure; None: none.
            uses: for each request, what the token it predicts asks of the logits.

        Raises:
            OfframpError: a stage has ended.
        """
        model, number = self.first.model, output.iteration
        allowed = [
            one if item.phase is Phase.DECODE and not item.request.runs_full_depth else None
            for item, one in zip(output.scheduled, exits, strict=True)
        ]
        rules = [NO_RULE if one is None else self._rule(one.policy) for one in allowed]
        plan = make_plan(output, allowed, rules, uses, model.early_exits, self.first.context)
        token_ids = [token for item in output.scheduled for token in item.token_ids]
        x = model.embed(on_device(np.array(token_ids, dtype=np.int64), model.device))
        plan, x = self.first.run(plan, x, lambda departures: self._known.append((number, departures)))
        if self._later is not None:
            self._under_way.add(number)
            self._later.send(encode(plan_message(plan, x)))

    def collect(self, *, wait: bool) -> list[tuple[int, Sequence[Departure]]]:
        """What rows have predicted since the last call.

        Args:
            wait: whether to wait until something has come back, if anything is under way.

        Returns:
            Numbers of iterations, and rows of each; in the order in which they became known.

        Raises:
            OfframpError: a stage has ended.
        """
        if self._later is not None:
            for data in self._later.receive(wait=wait and bool(self._under_way) and not self._known):
                message = decode(data)
                if message.kind is Kind.DONE:
                    self._under_way.remove(message.number)
                else:
                    assert message.kind is Kind.ANSWER, message.kind
                    self._known.append((message.number, answer_of(message)))
        known = list(self._known)
        self._known.clear()
        return known

    def _rule(self, policy: ExitPolicy) -> int:
        """The number by which stages know a policy's measure and shortlist; told to all of them when it is new."""
        key = (policy.measure, policy.shortlist, policy.shortlist_only)
        number = self._rules.get(key)
        if number is None:
            number = self._rules[key] = len(self._rules)
            bare = replace(policy, thresholds={})
            self.first.learn(number, bare)
            if self._later is not None:
                self._later.send(encode(rule_message(number, bare)))
        return number
