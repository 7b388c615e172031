"""What every exit makes of a text that is given: how likely it finds each token, what it would say, how sure it is.

The model reads the text as it is (teacher forcing), by its plain forward, so all keys and values are exact, as under
the KV policy `recompute`. What KV fill does to an answer shows in what is generated, not here.

Legend: N predicted tokens, T time, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offramp.common.checkpoint import AnyCheckpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import STATE_MEASURES, ExitPolicy
from offramp.common.model.multi_exit import MultiExitDecoder
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.tokenizer import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOW = 512


@dataclass(frozen=True)
class ExitReading:
    """What one exit makes of N tokens.

    Attributes:
        logprobs: of the tokens that are there, in nats.
        best: the token that it would say in the place of each; of several equally likely ones the first.
        confidences: what the exit test compares with the threshold.
        may_say: whether the exit policy's shortlist lets it say what it would.
    """

    logprobs: list[float]
    best: list[int]
    confidences: list[float]
    may_say: list[bool]


Readings = Mapping[int, ExitReading]
"""Of every exit by its layer, ascending; the final exit is the last."""


@torch.inference_mode()
def read(checkpoint: AnyCheckpoint, given: Sequence[int], predicted: Sequence[int], policy: ExitPolicy) -> Readings:
    """Read a text with every exit.

    Args:
        checkpoint: with its model on the CPU.
        given: tokens before, at least one; the source of an encoder-decoder model.
        predicted: N tokens, each of which is predicted from all before it.
        policy: whose measure and shortlist are asked; its thresholds are not.
    """
    model = checkpoint.model
    if isinstance(model, MultiExitTransformer):
        ids = torch.tensor([[*given, *predicted[:-1]]])
        layout: Any = model.layout(ids)
    else:
        ids = torch.tensor([[model.config.decoder_start_token_id, *predicted[:-1]]])
        layout = model.layout(model.encode(torch.tensor([list(given)])), ids)
    wanted = torch.tensor(predicted)
    h, depth, readings = model.embed(ids), 0, dict[int, ExitReading]()
    for layer in model.exit_layers:
        before = model.run_layers(h, depth, layer - 1, layout)
        h, depth = model.run_layers(before, layer - 1, layer, layout), layer
        logits = model.exit_logits(h, layer, layout)[0, -len(predicted) :].float()
        readings[layer] = _reading(model, layer, logits, h[0], before[0], wanted, policy)
    return readings


def _reading(
    model: MultiExitDecoder[Any, Any],
    layer: int,
    logits: Tensor,
    h: Tensor,
    before: Tensor,
    wanted: Tensor,
    policy: ExitPolicy,
) -> ExitReading:
    """Of logits [N, V] of an exit and states [T, D] after its layer and before it."""
    num = len(wanted)
    best = logits.argmax(dim=-1)
    seen, may_say = logits, torch.ones(num, dtype=torch.bool)
    if policy.shortlist is not None:
        shortlist = torch.tensor(policy.shortlist)
        listed = logits[:, shortlist]
        if policy.measure not in STATE_MEASURES:
            seen = listed
        if policy.shortlist_only:
            best = shortlist[listed.argmax(dim=-1)]
        elif policy.measure not in STATE_MEASURES:
            may_say = shortlist[listed.argmax(dim=-1)] == best
    is_final = layer == model.config.num_layers
    classifier = None if is_final else model.exit_classifier(layer)
    if is_final and policy.measure == "classifier":
        sure = torch.ones(num)
    else:
        sure = confidence(policy.measure, seen, h[-num:], before[-num:], classifier)
    logprobs = logits.log_softmax(dim=-1)[torch.arange(num), wanted]
    return ExitReading(logprobs.tolist(), best.tolist(), sure.tolist(), may_say.tolist())


def leaves_at(readings: Readings, policy: ExitPolicy, max_steps: int) -> list[int]:
    """The layer at which each token would leave.

    Args:
        readings: by the measure and shortlist of `policy`.
        policy: thresholds.
        max_steps: for thresholds that decay: most tokens.
    """
    final = max(readings)
    found: list[int] = []
    for step in range(len(readings[final].best)):
        found.append(final)
        for layer, reading in readings.items():
            if layer == final:
                break
            if reading.may_say[step] and reading.confidences[step] > policy.threshold(layer, step, max_steps):
                found[-1] = layer
                break
    return found


@dataclass(frozen=True)
class Read:
    """A text that exits have read.

    Attributes:
        readings: of its predicted tokens.
        layers: at which each of them leaves.
        num_bytes: of UTF-8 that they stand for.
    """

    readings: Readings
    layers: Sequence[int]
    num_bytes: int

    @property
    def nats(self) -> float:
        """Negative log-likelihood."""
        return -math.fsum(self.readings[layer].logprobs[step] for step, layer in enumerate(self.layers))

    @property
    def agrees(self) -> list[bool]:
        """Whether each token's exit would say what the last one would."""
        final = self.readings[max(self.readings)].best
        return [self.readings[layer].best[step] == final[step] for step, layer in enumerate(self.layers)]

    @property
    def confidences(self) -> list[float]:
        """Of each token at its exit."""
        return [self.readings[layer].confidences[step] for step, layer in enumerate(self.layers)]


@dataclass(frozen=True)
class Part:
    """Tokens that are read at once.

    Attributes:
        given: tokens before; see `read`.
        predicted: tokens that are predicted.
        num_bytes: of UTF-8 that those stand for.
    """

    given: Sequence[int]
    predicted: Sequence[int]
    num_bytes: int


def text_parts(
    checkpoint: AnyCheckpoint, tokenizer: PreTrainedTokenizerBase, text: str, window: int | None = None
) -> list[Part]:
    """A text in windows, each of whose tokens is predicted once.

    The first window is read after the token that begins texts (or ends them, where none begins them), every other one
    after the last token of the one before.

    Args:
        checkpoint: of a decoder-only model.
        tokenizer: of it.
        text: of any length.
        window: tokens of a part; None: 512, or what the model takes.

    Raises:
        OfframpError: the model has an encoder, so it reads no plain text; or it knows no token to begin with.
    """
    if not isinstance(checkpoint.model, MultiExitTransformer):
        raise OfframpError("perplexity is that of a decoder-only model's text, and this model has an encoder.")
    limit = checkpoint.model.config.max_position_embeddings - 1  # one comes before
    if window is None:
        window = min(_WINDOW, limit)
    if not 1 <= window <= limit:
        raise OfframpError(f"window {window} must be from 1 to {limit} tokens, what the model takes less one.")
    ids = encode_text(tokenizer, text, add_special_tokens=False)
    begin = tokenizer.bos_token_id
    starts = [*([begin] if isinstance(begin, int) else []), *checkpoint.eos_token_ids]
    if not starts:
        raise OfframpError("the model knows no token that begins or ends texts, so the first one cannot be predicted.")
    parts: list[Part] = []
    before, done = starts[0], 0
    for first in range(0, len(ids), window):
        some = ids[first : first + window]
        # A part has its share of the text's bytes: where a character's tokens are in two, nobody can say whose it is.
        so_far = round(len(text.encode()) * (first + len(some)) / len(ids))
        parts.append(Part([before], some, so_far - done))
        before, done = some[-1], so_far
    return parts


def choice_part(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], choice: str) -> Part:
    """A choice after a prompt, encoded apart from it, so that the prompt's tokens are the same for all choices.

    Raises:
        OfframpError: the choice has no token.
    """
    ids = encode_text(tokenizer, choice, add_special_tokens=False)
    if not ids or not prompt:
        raise OfframpError(f"the choice {choice!r} or its question has no token; write it out.")
    return Part(prompt, ids, len(choice.encode()))


class Reader:
    """Texts, each in parts, that are read once by every rule of confidence that is asked for.

    Args:
        checkpoint: of the model.
        texts: the parts of each.
        usual: whose measure and shortlist are asked where all tokens leave at one layer; None: the checkpoint's.
    """

    def __init__(
        self, checkpoint: AnyCheckpoint, texts: Sequence[Sequence[Part]], usual: ExitPolicy | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._usual = usual or checkpoint.policy or ExitPolicy("max_probability")
        self._texts = texts
        self._known: dict[Any, list[list[Readings]]] = {}

    def reads(self, way: int | ExitPolicy) -> list[list[Read]]:
        """The parts of all texts, read.

        Args:
            way: the layer at which all tokens leave, or what decides it.
        """
        policy = way if isinstance(way, ExitPolicy) else self._usual
        rule = (policy.measure, policy.shortlist, policy.shortlist_only)
        if rule not in self._known:
            self._known[rule] = [
                [read(self.checkpoint, part.given, part.predicted, policy) for part in parts] for parts in self._texts
            ]
        return [
            [
                Read(
                    readings,
                    leaves_at(readings, way, len(part.predicted))
                    if isinstance(way, ExitPolicy)
                    else [way] * len(part.predicted),
                    part.num_bytes,
                )
                for part, readings in zip(parts, found, strict=True)
            ]
            for parts, found in zip(self._texts, self._known[rule], strict=True)
        ]
