"""Greedy answers through the engine that serves, under a setting of depth, with the time and the depth of each token.

What is measured here is what users get: the same KV policy, the same batching. Times are of one run in which all
prompts are there from the start, and the engine takes as many as it has seats.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from offramp.serve.engine import Engine
    from offramp.serve.measures.records import RequestMetrics
    from offramp.serve.request.output import RequestOutput


@dataclass(frozen=True)
class Setting:
    """How deep tokens run, and how a batch goes together.

    Attributes:
        name: what tables call it.
        exits: of every request.
        engine: of the engine.
    """

    name: str
    exits: ExitOptions = field(default_factory=lambda: ExitOptions("full"))
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class Answer:
    """What was said to one prompt.

    Attributes:
        text: without stop strings and special tokens.
        token_ids: said, the one that ended the text included.
        exit_layers: layers run for each of them. The first token comes from the prompt's own pass, which runs all.
        confidences: what the exit test measured for each; None at the final exit.
        times: seconds from the start of the run to each of them.
        cost_s: its share of the run's time: every iteration's seconds are divided among those who got a token in it.
        finish_reason: `stop`, `length` where the limit cut it off, or `error`.
        error: why it failed; None: it did not. What came before counts in all other fields.
    """

    text: str
    token_ids: list[int]
    exit_layers: list[int]
    confidences: list[float | None]
    times: list[float]
    cost_s: float
    finish_reason: str
    error: str | None = None

    @property
    def decoding_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def deep_layers(self) -> list[int]:
        """Layers run for the tokens that follow another one: those that could leave early."""
        return self.exit_layers[1:]


@dataclass(frozen=True)
class Answers:
    """What was said to all prompts, in their order.

    Attributes:
        setting: under which.
        given: one for each prompt.
        seconds: from the start to the last token.
        layers_per_token: layers run for each token that could leave early; passes that were made up for later, or only
            for the sake of keys and values, count.
    """

    setting: Setting
    given: list[Answer]
    seconds: float
    layers_per_token: float

    @property
    def texts(self) -> list[str]:
        """Of all answers."""
        return [answer.text for answer in self.given]

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.given)

    @property
    def tokens_per_second(self) -> float:
        """Token generation speed of the paper: all tokens over all seconds."""
        return self.num_tokens / self.seconds

    @property
    def inner_token_latency_s(self) -> float:
        """The paper's inner-token latency: seconds from first to last token, summed over answers, by all tokens."""
        return sum(answer.decoding_s for answer in self.given) / self.num_tokens

    @property
    def depths(self) -> Counter[int]:
        """How many tokens that could leave early ran so many layers."""
        return Counter(layer for answer in self.given for layer in answer.deep_layers)


class Answerer:
    """A checkpoint that answers under one setting after the other; it holds one engine at a time.

    Args:
        path: a checkpoint directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine: Engine | None = None

    def engine(self, config: EngineConfig) -> Engine:
        """An engine with these settings: the last one, if they are the same."""
        from offramp.serve.engine import Engine

        if self._engine is None or self._engine.config != config:
            self._engine = None  # before another takes as much memory
            self._engine = Engine.from_checkpoint(self.path, config)
        return self._engine

    def answer(
        self,
        setting: Setting,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
        on_token: Callable[[int], None] = lambda count: None,
        *,
        may_fail: bool = False,
    ) -> Answers:
        """Answer all prompts greedily.

        Give the engine no `prefix_caching`, or an answer's time depends on what was asked before.

        Args:
            setting: see `Setting`.
            prompts: texts or token ids.
            max_tokens: most tokens of an answer.
            stop: strings that end it.
            on_token: told how many tokens came, for a progress bar.
            may_fail: answers that fail are given as they are, with their `error`, unless all of them do.

        Raises:
            OfframpError: there is no prompt, one that can never run, or an answer that failed.
        """
        from offramp.serve.offline import generate

        if not prompts:
            raise OfframpError("there is no prompt to answer; give at least one.")
        engine = self.engine(setting.engine)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, stop=tuple(stop))
        metrics: dict[int, RequestMetrics] = {}

        def take(index: int, output: RequestOutput) -> None:
            if output.metrics is not None:
                metrics[index] = output.metrics
            on_token(len(output.new_token_ids))

        totals, num_layers = engine.metrics.totals, engine.checkpoint.model.config.num_layers
        # Prompts run all layers, so what remains was run for tokens.
        before = totals.row_layers - num_layers * totals.prefill_rows
        start = time.perf_counter()
        completions = generate(engine, prompts, sampling, setting.exits, on_output=take)
        seconds = time.perf_counter() - start
        failed = [one.error for one in completions if one.error is not None]
        if len(failed) == len(completions) or (failed and not may_fail):
            raise OfframpError(f"{len(failed)} of {len(completions)} answers failed, the first because {failed[0]}")
        times = [[moment - start for moment in metrics[index].token_times] for index in range(len(completions))]
        given = [
            Answer(
                one.text,
                one.token_ids,
                one.exit_layers,
                one.confidences,
                moments,
                cost,
                one.finish_reason or "stop",
                one.error,
            )
            for one, moments, cost in zip(completions, times, costs(times), strict=True)
        ]
        later = sum(len(answer.deep_layers) for answer in given)
        spent = totals.row_layers - num_layers * totals.prefill_rows - before
        return Answers(setting, given, seconds, spent / later if later else float(num_layers))


def costs(times: Sequence[Sequence[float]]) -> list[float]:
    """The share that each answer has in the time up to the last token.

    An iteration is what ends when tokens come; its seconds go in equal parts to all answers that got a token in it.

    Args:
        times: of each answer, when its tokens came, in seconds from the start.
    """
    sharers: dict[float, set[int]] = defaultdict(set)
    for index, moments in enumerate(times):
        for moment in moments:
            sharers[moment].add(index)
    found, before = [0.0] * len(times), 0.0
    for moment in sorted(sharers):
        for index in sharers[moment]:
            found[index] += (moment - before) / len(sharers[moment])
        before = moment
    return found
