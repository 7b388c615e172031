"""From what the executor computed to what each request gets: tokens chosen, drafted or judged.

Whatever goes wrong for one request (logits that are not finite, a rule that raises) is that request's alone.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from offramp.serve.execution.departures import Departure
from offramp.serve.request.iteration_result import IterationResult, SampledToken, TokenLogprobs
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Blame, Request
from offramp.serve.sampling.sampler import Sample, SamplingState, logprobs, prompt_logprobs, sample
from offramp.serve.sampling.verification import Drafting, NoTokenError

log = logging.getLogger(__name__)


class Fail(Protocol):
    """Ends a request that cannot go on (`Scheduler.fail`)."""

    def __call__(self, request_id: str, error: str, blame: Blame = "engine") -> object:
        """Is told why, in one sentence, and what is at fault."""
        ...


class DecodingState:
    """What has to be known of one request to choose its tokens.

    Attributes:
        sampling: settings, seed and counts.
        drafting: `verify`: says and judges drafts; else None.
    """

    def __init__(self, sampling: SamplingState, num_layers: int) -> None:
        """Begin before the first token of a model with `num_layers` layers."""
        self.sampling = sampling
        self.drafting = Drafting(sampling, num_layers) if sampling.request.exits.kv_policy == "verify" else None

    @property
    def request(self) -> Request:
        """Whose tokens."""
        return self.sampling.request

    @property
    def logits_use(self) -> LogitsUse:
        """What the next iteration's tokens ask of the logits."""
        return self.sampling.logits_use if self.drafting is None else self.drafting.logits_use


class IterationResults:
    """Collects one iteration's results, request by request.

    Attributes:
        by_id: request id -> what it got.
    """

    def __init__(self, states: Sequence[DecodingState], num_layers: int, fail: Fail) -> None:
        """Start with nothing.

        Args:
            states: of the iteration's requests.
            num_layers: L.
            fail: told of requests that cannot go on.
        """
        self._states = states
        self._num_layers = num_layers
        self._fail = fail
        self._prompts: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._failed: set[int] = set()
        self.by_id: dict[str, IterationResult] = {}

    def add_prompt(self, item: int, start: int, logits: Tensor) -> None:
        """Take in the logits [N, V] of rows of a prompt from position `start` on (`executor.PromptLogits`)."""
        request = self._states[item].request
        number = request.sampling.prompt_logprobs
        assert number is not None
        if item in self._failed:
            return
        if not bool(logits.amax(dim=-1).isfinite().all()):
            self._end(item, NoTokenError(), self._num_layers)
            return
        tokens = request.prompt_token_ids[start + 1 : start + 1 + len(logits)]
        self._prompts[item] += prompt_logprobs(logits, tokens, number)

    def add(self, departures: Iterable[Departure]) -> None:
        """Choose the tokens of all rows that predict one."""
        for departure in departures:
            plain: list[int] = []
            own: dict[int, list[int]] = {}  # rows of requests that draft and judge
            for place, item in enumerate(departure.items):
                if self._is_plain(item, departure.exit_layer):
                    plain.append(place)
                else:
                    own.setdefault(item, []).append(place)
            self._choose(departure, plain)
            for item, places in own.items():
                try:
                    self._draft_or_judge(departure, item, places)
                except Exception as fault:
                    self._end(item, fault, departure.exit_layer)
        for item, parts in self._prompts.items():
            if item not in self._failed:
                request_id = self._states[item].request.request_id
                result = self.by_id.get(request_id, IterationResult())
                self.by_id[request_id] = result._replace(prompt_logprobs=tuple(parts))

    def _is_plain(self, item: int, layer: int) -> bool:
        """Whether a row's token is handed out as it is chosen."""
        drafting = self._states[item].drafting
        # The first token, which the prompt's last row says, and one after which no draft waits.
        return drafting is None or (layer == self._num_layers and not self._states[item].request.drafts)

    def _end(self, item: int, fault: Exception, layer: int) -> None:
        state = self._states[item]
        request_id = state.request.request_id
        self._failed.add(item)
        if not isinstance(fault, NoTokenError):
            log.error("request %s failed", request_id, exc_info=fault)
            self._fail(request_id, f"no token can be chosen: {type(fault).__name__}: {fault}")
        elif state.sampling.fault is not None:
            self._fail(request_id, state.sampling.fault, "request")
        else:
            self._fail(
                request_id,
                f"the logits at layer {layer} are not finite, so no token can be chosen; the weights are damaged or "
                "too large for the engine's dtype",
                "numbers",
            )

    def _choose(self, departure: Departure, places: Sequence[int]) -> None:
        """The next tokens of rows of different requests."""
        if not places:
            return
        if departure.best is not None:
            logits, token_ids = departure.best.logits.tolist(), departure.best.token_ids.tolist()
            for place in places:
                is_sound = math.isfinite(logits[place])
                self._take(departure, place, self._best(departure, place, token_ids[place]) if is_sound else None)
            return
        assert departure.logits is not None
        logits = departure.logits if len(places) == len(departure.items) else departure.logits[places]
        states = [self._states[departure.items[place]].sampling for place in places]
        try:
            chosen = sample(logits, states)
        except Exception as fault:
            if len(places) == 1:
                self._end(departure.items[places[0]], fault, departure.exit_layer)
            else:  # one of them is at fault
                for place in places:
                    self._choose(departure, [place])
            return
        for place, one in zip(places, chosen, strict=True):
            self._take(departure, place, one)

    def _best(self, departure: Departure, place: int, token_id: int) -> Sample:
        """A best token, with what is to be reported of it."""
        number = self._states[departure.items[place]].request.sampling.logprobs
        if number is None or departure.logits is None:
            return Sample(token_id, None)
        return Sample(token_id, logprobs(departure.logits[place], token_id, number))

    def _take(self, departure: Departure, place: int, chosen: Sample | None) -> None:
        item, layer = departure.items[place], departure.exit_layer
        if chosen is None:
            self._end(item, NoTokenError(), layer)
            return
        token = SampledToken(chosen.token_id, layer, departure.confidence[place], chosen.logprobs)
        self.by_id[self._states[item].request.request_id] = IterationResult((token,))

    def _draft_or_judge(self, departure: Departure, item: int, places: Sequence[int]) -> None:
        """A token of an early exit, to be judged later; or drafts that the full model has read now."""
        state, layer = self._states[item], departure.exit_layer
        drafting, best, logits = state.drafting, departure.best, departure.logits
        assert drafting is not None
        choices: list[int] = []
        if best is not None:
            if not all(map(math.isfinite, best.logits[places].tolist())):
                raise NoTokenError
            choices = best.token_ids[places].tolist()
        if layer == self._num_layers:
            assert len(places) == len(state.request.drafts) + 1, "every draft has a row, and the newest token"
            tokens = drafting.judge_choices(choices) if logits is None else drafting.judge(logits[places])
            self.by_id[state.request.request_id] = IterationResult(tokens)
            return
        (place,) = places
        confidence = departure.confidence[place]
        if logits is None:
            draft = SampledToken(choices[0], layer, confidence)
        else:
            draft = drafting.draft(logits[place], layer, confidence)
        self.by_id[state.request.request_id] = IterationResult(draft=draft)
