"""What one way of generating gives: texts, depths, and both beside those of full depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from offramp.serve.bench.quality import ratio_of_means, rouge_l
from offramp.serve.engine import Engine
from offramp.serve.offline import Completion, generate
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.sampling_params import SamplingParams


@dataclass(frozen=True)
class Outcome:
    """Texts of all prompts in one way of generating.

    Attributes:
        name: of the way.
        completions: one for each prompt.
        scores: [texts] ROUGE-L against the references.
    """

    name: str
    completions: list[Completion]
    scores: list[float]

    @property
    def shares(self) -> dict[int, float]:
        """Exit layer -> share of tokens. The first token of a text comes from the prompt and never leaves early."""
        layers = [layer for completion in self.completions for layer in completion.exit_layers]
        return {layer: count / len(layers) for layer, count in sorted(Counter(layers).items())}

    @property
    def mean_layers(self) -> float:
        """Layers per token."""
        return sum(layer * share for layer, share in self.shares.items())

    def identical(self, full: Outcome) -> float:
        """Share of texts that are token for token those of `full`."""
        pairs = zip(self.completions, full.completions, strict=True)
        return sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs) / len(self.completions)

    def ratio(self, full: Outcome) -> float:
        """ROUGE-L as a share of that of `full`."""
        return ratio_of_means(self.scores, full.scores)[0]

    def row(self, full: Outcome) -> dict[str, Any]:
        """A line of the table."""
        ratio, low, high = ratio_of_means(self.scores, full.scores)
        return {
            "name": self.name,
            "rouge_l": round(fmean(self.scores), 4),
            "ratio": round(ratio, 4),
            "ratio_low": round(low, 4),
            "ratio_high": round(high, 4),
            "identical": round(self.identical(full), 4),
            "layers": round(self.mean_layers, 2),
            "tokens": sum(len(completion.token_ids) for completion in self.completions),
            **{f"share_{layer}": round(share, 4) for layer, share in self.shares.items()},
        }


def outcome(
    name: str,
    engine: Engine,
    rows: Sequence[dict[str, Any]],
    exits: ExitOptions,
    max_tokens: int,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Outcome:
    """Generate greedily for all rows, through the engine, and score the texts.

    Args:
        name: of the way.
        engine: an idle engine.
        rows: with `prompt` and `references`.
        exits: how deep, and what upper layers see of tokens that left.
        max_tokens: most tokens of a text.
        on_progress: told the name, how many texts are done, and of how many.
    """
    done = 0

    def count(_index: int, output: RequestOutput) -> None:
        nonlocal done
        if output.finish_reason is not None:
            done += 1
            on_progress(name, done, len(rows))

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    found = generate(engine, [row["prompt"] for row in rows], sampling, exits, on_output=count)
    return Outcome(name, found, rouge_l([one.text for one in found], [row["references"] for row in rows]))
