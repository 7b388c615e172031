"""Sequence-level distillation (Kim and Rush, 2016): the full model's own greedy texts become the training set.

People say one thing in many ways, so a model of what people wrote is unsure of nearly every word, and an exit can only
guess which way the layers above it will choose. The greedy text is one way for each meaning: a function that a third of
the layers can learn as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.texts.rows import write_rows

from offramp.serve.engine import Engine
from offramp.serve.offline import generate
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.sampling_params import SamplingParams


def own_texts(
    engine: Engine, prompts: Sequence[str], max_tokens: int, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Rows to train on: each prompt and the text that the engine's model gives it at full depth.

    Texts that did not end by themselves are left out.

    Args:
        engine: an idle engine.
        prompts: what to write about.
        max_tokens: most tokens of a text.
        on_progress: told how many texts are done, and of how many.
    """
    done = 0

    def count(_index: int, output: RequestOutput) -> None:
        nonlocal done
        if output.finish_reason is not None:
            done += 1
            on_progress(done, len(prompts))

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    found = generate(engine, prompts, sampling, ExitOptions("full"), on_output=count)
    return [
        {"prompt": prompt, "completion": completion.text}
        for prompt, completion in zip(prompts, found, strict=True)
        if completion.finish_reason == "stop"
    ]


def write_own_texts(
    engine: Engine,
    prompts: Mapping[str, Sequence[str]],
    max_tokens: int,
    out: Path,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """A file `NAME.jsonl` of own texts for each name.

    Args:
        engine: an idle engine.
        prompts: name -> what to write about.
        max_tokens: most tokens of a text.
        out: folder of the files.
        on_progress: told the name, how many texts are done, and of how many.
    """
    for name, asked in prompts.items():
        rows = own_texts(engine, asked, max_tokens, lambda done, total, name=name: on_progress(name, done, total))
        write_rows(out / f"{name}.jsonl", rows)
