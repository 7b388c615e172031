"""What the scheduler keeps of a request that was admitted, beside the request itself: rank, block table, depth."""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.serve.kv_cache.prefix_cache import ROOT
from offramp.serve.request.request import Request
from offramp.serve.scheduling.depth_grouping import DepthMean
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest


@dataclass(eq=False)
class SequenceState:
    """A request with its place in the order and its place in the cache.

    Attributes:
        request: the request.
        order: counts first admissions; kept when it is preempted.
        blocks: its block table.
        source_blocks: the block table of its source; empty without one.
        is_encoded: whether the keys and values of its source are in these.
        num_known: blocks at its beginning that the prefix cache knows.
        chain: serial number of the last of these, or `ROOT`.
        early_from: `fill`, `static`: position of the first token that left early; keys and values from there on are not
            exact, and never will be.
        num_incomplete: `recompute`, `verify`: computed tokens, the last ones, whose keys and values are missing in some
            layers. `Request.num_pending` counts the same but for a preemption, after which there are none.
        depth: how deep its tokens go.
        last_chosen: the last iteration in which it might run.
        in_flight: its rows that were scheduled and not answered yet; it is not scheduled again before they are.
    """

    request: Request
    order: int = -1
    blocks: list[int] = field(default_factory=list)
    source_blocks: tuple[int, ...] = ()
    is_encoded: bool = False
    num_known: int = 0
    chain: int = ROOT
    early_from: int | None = None
    num_incomplete: int = 0
    depth: DepthMean = field(default_factory=DepthMean)
    last_chosen: int = -1
    in_flight: ScheduledRequest | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the more urgent: priority, then who was first admitted first."""
        return self.request.priority, self.order

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before it decodes: the prompt, and after a preemption all but the newest token."""
        return max(self.request.num_prompt_tokens, self.request.num_tokens - 1)

    @property
    def num_source_rows(self) -> int:
        """Rows of the encoder that must run, all at once, before any other."""
        return 0 if self.is_encoded else self.request.num_source_tokens

    @property
    def decodes(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.request.num_computed_tokens >= self.num_prefill_tokens

    @property
    def num_decode_rows(self) -> int:
        """Most rows that its next decode can take: the newest token, and those that may come along to be completed."""
        return 1 + self.num_incomplete

    @property
    def exact_limit(self) -> int:
        """Tokens that may be taken from the prefix cache. The newest token has to run: its logits are needed."""
        limit = self.request.num_tokens - 1
        return limit if self.early_from is None else min(limit, self.early_from)

    def expected_depth(self, num_layers: int) -> float | None:
        """Layers that its next decode is expected to run; None if nothing is known."""
        if self.request.runs_full_depth:
            return num_layers
        static_layer = self.request.exits.static_layer
        return self.depth.value if static_layer is None else static_layer

    def rows(self, phase: Phase, num_tokens: int, num_layers: int) -> ScheduledRequest:
        """Its next tokens as rows of an iteration of a model with `num_layers` layers."""
        request = self.request
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        first, exit_layers = request.num_prompt_tokens, None
        if phase is Phase.PREFILL and request.exits.kv_policy in ("fill", "static") and stop > first:
            # The row at the position of output token i predicted token i + 1.
            exit_layers = tuple(
                num_layers if position < first else request.exit_layers[position - first + 1]
                for position in range(start, stop)
            )
            if min(exit_layers) == num_layers:
                exit_layers = None
        return ScheduledRequest(
            request=request,
            phase=phase,
            start=start,
            num_tokens=num_tokens,
            block_table=tuple(self.blocks),
            samples=stop == request.num_tokens and request.sampling.max_tokens > 0,
            exit_layers=exit_layers,
            source_table=self.source_blocks,
            encodes=self.num_source_rows > 0,
        )
