"""Shadow audit: some answers are made once more at full depth, while nobody waits, and compared.

A calibrated threshold is a promise about texts like the calibration's. Whether it holds for what people really ask is
seen by asking the full model the same. It costs no request anything: an audit runs while the engine has no other work,
and makes way for whoever comes.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offramp.serve.engine_thread import EngineThread
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request

BACKLOG = 256
"""Answers that wait for an idle engine; of a busy one the oldest go unaudited."""

_Z = 1.959963984540054
"""Of a 95% interval."""


@dataclass
class Agreement:
    """What audits have found.

    Attributes:
        texts: answers audited.
        same_texts: those that full depth gives token for token.
        tokens: of the audited answers.
        agreeing_tokens: those before an answer's first difference.
    """

    texts: int = 0
    same_texts: int = 0
    tokens: int = 0
    agreeing_tokens: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the share of same texts (Wilson, 1927); 0 to 1 without any."""
        if not self.texts:
            return 0.0, 1.0
        n, share, z2 = self.texts, self.same_texts / self.texts, _Z * _Z
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z / (1 + z2 / n) * (share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5
        return max(0.0, centre - half), min(1.0, centre + half)


class ShadowAudit:
    """Audits a share of the answers of an engine's thread. All but the construction happens in that thread.

    Args:
        share: of the answers that could be audited: greedy ones that may leave early.
        on_compared: told the audited request, and how many of its tokens come before the first difference.
        seed: of the choice.
    """

    def __init__(
        self, share: float, on_compared: Callable[[Request, int], None] = lambda request, agreeing: None, seed: int = 0
    ) -> None:
        self.found = Agreement()
        self._share, self._on_compared = share, on_compared
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._backlog: deque[Request] = deque(maxlen=BACKLOG)
        self._running: tuple[Request, str] | None = None

    @property
    def num_waiting(self) -> int:
        """Answers chosen and not audited yet."""
        return len(self._backlog) + (self._running is not None)

    def finished(self, request: Request) -> None:
        """An answer is whole."""
        # Drawn ones differ by chance, and full depth is what the others are compared with.
        if request.sampling.temperature != 0 or request.exits.kv_policy == "full" or not request.output_token_ids:
            return
        if self._random.random() < self._share:
            self._backlog.append(request)

    def advance(self, thread: EngineThread) -> None:
        """Start the next audit if nobody waits, and put off the running one if somebody does."""
        busy = bool(thread.num_running or thread.num_waiting)
        if self._running is not None:
            request, audit_id = self._running
            if busy and thread.cancel(audit_id):
                self._running = None
                self._backlog.appendleft(request)
        elif self._backlog and not busy and thread.failure is None:
            request = self._backlog.popleft()
            audit = Request(
                f"audit-{next(self._numbers)}",
                request.prompt_token_ids,
                # What only decorates an answer is left out.
                dataclasses.replace(request.sampling, logprobs=None, prompt_logprobs=None),
                ExitOptions("full"),
                request.eos_token_ids,
                source_token_ids=request.source_token_ids,
            )
            self._running = request, audit.request_id
            thread.submit_background(audit, _Audit(audit, lambda: self._compare(request, audit), self._drop))

    def _compare(self, answer: Request, audit: Request) -> None:
        self._running = None
        said, full = answer.output_token_ids, audit.output_token_ids
        agreeing = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, full, strict=False)))
        self.found.texts += 1
        self.found.same_texts += said == full
        self.found.tokens += len(said)
        self.found.agreeing_tokens += agreeing
        self._on_compared(answer, agreeing)

    def _drop(self) -> None:
        self._running = None


@dataclass(frozen=True)
class _Audit:
    """Where the outputs of an audit go.

    Attributes:
        request: The audit.
        done: Called when it is whole.
        failed: Called when it is over without an answer.
    """

    request: Request
    done: Callable[[], None]
    failed: Callable[[], None]

    def put(self, output: RequestOutput) -> None:
        """See `Sink`."""
        if output.error is not None:
            self.failed()
        elif output.finish_reason is not None:
            self.done()

    def fail(self, request_id: str, cause: Exception) -> None:
        """See `Sink`."""
        self.failed()
