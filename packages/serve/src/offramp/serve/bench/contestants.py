"""Who is measured: the engine in its variants, transformers' `generate`, and other engines in processes of their own.

All of them answer the same question with the same thing, when each token came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offramp.serve.bench.plan import Variant
from offramp.serve.bench.trial import Question, Trial


@dataclass(frozen=True)
class Identity:
    """Who somebody is.

    Attributes:
        name: in tables.
        dtype: of weights and states.
        variant: of the engine; None for others.
        kernels: what computes the engine's layers here; None for others.
        max_batch: most sequences at once; None is no limit.
        closed_loop: whether a sequence can start while others are under way.
        own_process: whether it runs in a process of its own.
    """

    name: str
    dtype: str
    variant: Variant | None = None
    kernels: str | None = None
    max_batch: int | None = None
    closed_loop: bool = True
    own_process: bool = False

    def objection(self, question: Question) -> str | None:
        """Why it cannot answer; None if it can."""
        if self.max_batch is not None and question.in_flight > self.max_batch:
            return f"takes at most {self.max_batch} sequence(s) at once"
        if question.closed_loop and not self.closed_loop:
            return "starts all its sequences together, so it keeps no seats full"
        return None


class Contestant(Protocol):
    """Somebody who generates, greedily."""

    @property
    def who(self) -> Identity:
        """Who it is."""
        ...

    def run(self, question: Question) -> Trial:
        """Generate for all prompts.

        Raises:
            OfframpError: it failed.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...
