"""The one contract between the scheduler and whatever runs the model: what the next iteration computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from offramp.serve.request.request import Request


class Phase(Enum):
    """What the rows of a request are. Said outright: a position cannot tell (a prompt may be one token long)."""

    PREFILL = auto()
    """Known tokens: of the prompt, which never exit early, or of an answer that runs again after a preemption."""
    DECODE = auto()
    """One generated token, which may exit early."""


class ScheduledRequest(NamedTuple):
    """The rows of one request in one iteration: consecutive tokens of prompt and output as one sequence.

    Attributes:
        request: whose rows; read only for whoever runs the model.
        phase: prefill or decode; one iteration never mixes the two within a request.
        start: position of the first row, from 0. Keys and values of every earlier position are in the cache.
        num_tokens: number of rows.
        block_table: ids of all blocks that the request refers to, in the order of its positions: position p lies in
            block `block_table[p // block_size]` at slot `p % block_size`. It reaches at least to the last row; it may
            change between iterations, but never for a position whose keys and values are not exact.
        samples: whether the last row predicts a token. False for every chunk of a prompt but the last, for rows that
            run again after a preemption, and where no token is asked for (`max_tokens` 0).
        exit_layers: for prefill rows that run again after a preemption, the layers each of them ran at first and leaves
            at again (those of the prompt ran all layers); None: prefill rows run all layers.
        source_table: ids of the blocks for keys and values of cross-attention, in the order of the source's tokens;
            empty without a source. Nobody else refers to them, and they stay the same until the request ends or is
            preempted.
        encodes: whether the source must be encoded into them before these rows run.
    """

    request: Request
    phase: Phase
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    samples: bool
    exit_layers: tuple[int, ...] | None = None
    source_table: tuple[int, ...] = ()
    encodes: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the rows."""
        return self.request.tokens(self.start, self.start + self.num_tokens)


@dataclass(frozen=True)
class SchedulerOutput:
    """What one iteration runs.

    Attributes:
        iteration: counts from 0.
        scheduled: requests with rows in this iteration: decodes first, then prefills, each by priority and admission.
        preempted: ids of requests whose blocks were taken since the last iteration; what is kept for their rows (the
            states of tokens that left early) is void.
        copies: (from, to) blocks whose content is to be copied before anything is computed (copy on write), one after
            the other: a block may be copied from and then copied to. All are for requests in `scheduled`.
    """

    iteration: int
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the iteration, those of the encoder apart."""
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def num_source_tokens(self) -> int:
        """Rows of the encoder."""
        return sum(item.request.num_source_tokens for item in self.scheduled if item.encodes)
