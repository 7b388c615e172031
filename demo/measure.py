"""Ask a running server with the unmodified OpenAI client, several requests at a time, and note what came back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import openai


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        text: as served.
        exit_layers: for each token, the number of layers run.
    """

    text: str
    exit_layers: list[int]


@dataclass(frozen=True)
class Measurement:
    """One way of serving, over all prompts.

    Attributes:
        name: what the table calls it.
        answers: in the order of the prompts.
        seconds: wall time of the median round.
        full_tokens_per_second: of full depth on the same server in the same turns, for the speed-up.
        right: share of answers that equal the reference.
    """

    name: str
    answers: list[Answer]
    seconds: float
    full_tokens_per_second: float = 0.0
    right: float = 0.0

    def compared(self, full_tokens_per_second: float, references: Sequence[str]) -> Measurement:
        """The same with what it is compared with."""
        right = [answer.text == reference for answer, reference in zip(self.answers, references, strict=False)]
        return replace(self, full_tokens_per_second=full_tokens_per_second, right=sum(right) / len(right))

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """Inverse of `to_json`."""
        return cls(**{**data, "answers": [Answer(**answer) for answer in data["answers"]]})

    @property
    def layers(self) -> list[int]:
        """Exit layers of all tokens."""
        return [layer for answer in self.answers for layer in answer.exit_layers]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of wall time, over HTTP, prompts included in the time."""
        return len(self.layers) / self.seconds

    @property
    def mean_layers(self) -> float:
        """Layers per token."""
        return sum(self.layers) / len(self.layers)

    @property
    def shares(self) -> dict[int, float]:
        """Exit layer -> share of tokens."""
        counts = Counter(self.layers)
        return {layer: counts[layer] / len(self.layers) for layer in sorted(counts)}

    def identical(self, full: Measurement) -> float:
        """Share of texts that are those of the full model, for as many as were asked."""
        pairs = list(zip(self.answers, full.answers, strict=False))
        return sum(ours.text == theirs.text for ours, theirs in pairs) / len(pairs)


async def measure(
    base_url: str,
    model: str,
    prompts: Sequence[str],
    ways: dict[str, dict[str, Any]],
    *,
    max_tokens: int,
    concurrency: int,
    rounds: int,
    on_progress: Callable[[int, int], None],
) -> list[Measurement]:
    """Ask all prompts in each way of serving.

    Args:
        base_url: of the server's OpenAI API.
        model: its name.
        prompts: what to ask, greedily.
        ways: name -> the `offramp` object of the request.
        max_tokens: most tokens per answer.
        concurrency: requests in flight.
        rounds: the ways take turns this many times; times are medians.
        on_progress: told how many requests are done, out of how many.
    """
    done, total = 0, len(prompts) * len(ways) * rounds
    answers: dict[str, list[Answer]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    seats = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client:

        async def ask(prompt: str, options: dict[str, Any]) -> Answer:
            nonlocal done
            async with seats:
                completion = await client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    temperature=0.0,
                    extra_body={"offramp": {**options, "return_exit_layers": True}},
                )
            done += 1
            on_progress(done, total)
            extra: Any = completion.model_extra
            return Answer(completion.choices[0].text, list(extra["offramp"]["exit_layers"]))

        # The first request of a server pays for what it loads lazily.
        await ask(prompts[0], {})
        done = 0
        for _ in range(rounds):
            for name, options in ways.items():
                start = time.perf_counter()
                answers[name] = list(await asyncio.gather(*(ask(prompt, options) for prompt in prompts)))
                seconds[name].append(time.perf_counter() - start)
    return [Measurement(name, answers[name], sorted(seconds[name])[len(seconds[name]) // 2]) for name in ways]
