"""`ExitSamples`: what every exit writes, as a table at every validation.

A column of greedy text for each exit, side by side, says more than a loss does of what an exit has learned:

    trainer:
      callbacks:
        - class_path: offramp.train.tracking.exit_samples.ExitSamples
          init_args: {prompts: ["The weather today is"], tokens: 32}

`offramp fit` adds one with the defaults unless a recipe names it; `tokens: 0` switches it off.

There is a row for every prompt and exit, and all rows take the same forward pass as a validation batch, once for each
token and with the last position alone labelled. So it runs on whatever stages, ranks and precision the run has, and
needs no second copy of the model. No keys and values are kept, which would need other layers; the share of a validation
that it may cost is bounded instead.

Legend: B batch, T time, X exits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.module import MultiExitModule
from offramp.train.tracking.artifacts import record_text

FILE = "exit_samples/step_{:08d}.csv"
PROMPT_TOKENS = 32
"""Longest prompt; of a longer one its end is taken."""
LARGEST_SHARE = 0.25
"""Of the positions of a validation, those that samples may take beside them."""


class Prompt(NamedTuple):
    """How a text begins.

    Attributes:
        tokens: to be continued.
        expected: how the data go on; nothing where that is not known.
    """

    tokens: list[int]
    expected: list[int]


class ExitSamples(pl.Callback):
    """Writes `exit_samples/step_*.csv` at every validation of a fit: prompt, how the data go on, what each exit says.

    Args:
        prompts: texts to be continued; None takes the first of the validation data.
        count: how many of the validation data.
        tokens: that each exit writes, 0 for no table at all. They get fewer, at least one, where they would take more
            than a quarter of a validation on the data's own prompts.
    """

    def __init__(self, prompts: list[str] | None = None, count: int = 2, tokens: int = 16) -> None:
        if count < 1 or tokens < 0 or prompts == []:
            raise OfframpError(
                f"ExitSamples has count {count}, tokens {tokens} and prompts {prompts}; count must be at least 1, and "
                "tokens: 0 switches it off."
            )
        self.prompts, self.count, self.tokens = prompts, count, tokens
        self._found: list[Prompt] = []
        self._positions = 0
        self._plan: tuple[list[Prompt], int] | None = None

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count anew."""
        self._found, self._positions = [], 0

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Look for prompts, and at how much a validation is."""
        if self._plan is None and isinstance(batch, TokenBatch):
            self._positions += batch.input_ids.numel()
            if len(self._found) < self.count:
                self._found += prompts_of(batch, self.count - len(self._found), self.tokens)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the table; all ranks take part."""
        if not self.tokens or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if not isinstance(pl_module, MultiExitModule) or pl_module.decoder_start_token_id is not None:
            return  # sources are no prompts
        tokenizer = _tokenizer(trainer)
        if self._plan is None:
            # Replicas have other rows, and all ranks have to do the same.
            self._plan = trainer.strategy.broadcast(self._planned(pl_module, tokenizer))
        prompts, tokens = self._plan
        if prompts:
            ends = pl_module.source.eos_token_ids
            said = continuations(pl_module, [prompt.tokens for prompt in prompts], tokens, ends)
            if trainer.is_global_zero:
                final = pl_module.source.model.config.num_layers
                text = table(prompts, said, final, tokenizer, ends)
                record_text(trainer, FILE.format(trainer.global_step - 1), text)

    def _planned(self, module: MultiExitModule, tokenizer: Any) -> tuple[list[Prompt], int]:
        """Prompts and the number of tokens to be written."""
        assert module.max_sequence_length is not None
        room = module.max_sequence_length - 1
        if self.prompts is not None:
            if tokenizer is None:
                raise OfframpError(
                    "ExitSamples.prompts are texts, but the data module has no tokenizer; leave them out."
                )
            found = [Prompt(list(tokenizer(text)["input_ids"])[-room:], []) for text in self.prompts]
            found = [prompt for prompt in found if prompt.tokens]
            longest = max((len(prompt.tokens) for prompt in found), default=0)
            return found, min(self.tokens, room + 1 - longest)
        found = [Prompt(tokens[-room:], expected) for tokens, expected in self._found]
        longest = max((len(prompt.tokens) for prompt in found), default=0)
        exits = len(module.run_objective.evaluated.layers)
        tokens = min(self.tokens, room + 1 - longest)
        while tokens > 1 and len(found) * exits * (longest + tokens) * tokens > LARGEST_SHARE * self._positions:
            tokens -= 1
        return found, tokens


def prompts_of(batch: TokenBatch, count: int, tokens: int) -> list[Prompt]:
    """The first prompts of a batch, up to `count`: what is not trained on, or the first half of a plain text.

    Args:
        batch: of validation data.
        count: how many.
        tokens: of what is expected.
    """
    found: list[Prompt] = []
    for ids, labels, segments in zip(*(tensor.tolist() for tensor in batch), strict=True):
        start = 0
        while start < len(ids) and len(found) < count:
            stop = next((at for at in range(start, len(ids)) if segments[at] != segments[start]), len(ids))
            first = next((at for at in range(start, stop) if labels[at] != IGNORED_LABEL), None)
            if first is not None:
                if first == start:
                    first = start + min((stop - start - 1) // 2, PROMPT_TOKENS - 1)
                expected = [label for label in labels[first:stop] if label != IGNORED_LABEL]
                found.append(Prompt(ids[max(start, first + 1 - PROMPT_TOKENS) : first + 1], expected[:tokens]))
            start = stop
    return found


def continuations(
    module: MultiExitModule, prompts: Sequence[list[int]], tokens: int, ends: Sequence[int]
) -> dict[int, list[list[int]]]:
    """Exit layer -> what it writes after each prompt, greedily; all ranks take part, and get the same.

    Args:
        module: within a validation.
        prompts: the same on all ranks.
        tokens: that are written, or fewer where all texts have ended.
        ends: tokens that end a text.
    """
    layers = module.run_objective.evaluated.layers
    longest = max(len(prompt) for prompt in prompts) + tokens
    texts = [list(prompt) for _ in layers for prompt in prompts]  # row e * len(prompts) + p
    owner = torch.arange(len(layers)).repeat_interleave(len(prompts))
    unknown: set[int] = set()
    for _ in range(tokens):
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        labels, segments = torch.full_like(ids, IGNORED_LABEL), torch.ones_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            labels[row, len(text) - 1] = 0  # any: only what is said there is wanted
            segments[row, : len(text)] = 0
        said = module.most_probable(TokenBatch(ids, labels, segments)).cpu()  # [X, B]
        chosen = said[owner, torch.arange(len(texts))].tolist()
        unknown = {layers[int(owner[row])] for row, token in enumerate(chosen) if token < 0}
        for text, token in zip(texts, chosen, strict=True):
            text.append(max(token, 0))
        if all(ended(text[len(prompts[row % len(prompts)]) :], ends) for row, text in enumerate(texts)):
            break
    written = [text[len(prompts[row % len(prompts)]) :] for row, text in enumerate(texts)]
    return {
        layer: written[place * len(prompts) : (place + 1) * len(prompts)]
        for place, layer in enumerate(layers)
        if layer not in unknown
    }


def ended(tokens: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether a text has come to its end."""
    return any(token in ends for token in tokens)


def table(
    prompts: Sequence[Prompt], said: dict[int, list[list[int]]], final: int, tokenizer: Any, ends: Sequence[int]
) -> str:
    """CSV, which MLflow shows as a table: a line for each prompt, a column for each exit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [f"exit {layer:02d}" + (" (final)" if layer == final else "") for layer in said]
    writer.writerow(["prompt", "expected", *columns])
    for number, prompt in enumerate(prompts):
        written = [until_end(own[number], ends) for own in said.values()]
        writer.writerow([in_text(tokens, tokenizer) for tokens in (*prompt, *written)])
    return text.getvalue()


def until_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Up to the first token that ends a text, which is among them."""
    stop = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:stop])


def in_text(tokens: Sequence[int], tokenizer: Any) -> str:
    """Tokens as text, or as numbers without a tokenizer."""
    return " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens))


def _tokenizer(trainer: pl.Trainer) -> Any:
    data = getattr(trainer, "datamodule", None)
    return getattr(data, "tokenizer", None)
