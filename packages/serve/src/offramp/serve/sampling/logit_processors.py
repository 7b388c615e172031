"""What changes logits before a token is chosen: penalties, bias, and tokens that must not be said. Small pure pieces.

They work on *cells*, (row, token) pairs of logits [N, V], never on whole rows: a row that asks for nothing is not
touched by its neighbours', and each cell is computed by itself, so a row is changed the same in any batch. In order:
repetition penalty, presence and frequency penalties, bias, and at last the tokens that are ruled out.

Legend: N rows, V vocabulary, P cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.serve.request.sampling_params import SamplingParams

_Ids = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]


class TokenCounts:
    """How often each token occurs in the prompt and the output of one request, kept up to date token by token."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """Count a prompt; the output starts empty."""
        prompt = sorted(set(prompt_token_ids))
        self._places = {token: place for place, token in enumerate(prompt)}
        self._num_prompt = len(prompt)
        self._ids = np.array(prompt, dtype=np.int64)
        self._counts = np.zeros(len(prompt), dtype=np.float32)

    def add(self, token_id: int) -> None:
        """The output grows by a token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):  # doubled, so that a token costs the same however long the output is
            spare = max(16, place)
            self._ids = np.concatenate((self._ids, np.zeros(spare, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(spare, dtype=np.float32)))
        self._ids[place] = token_id
        self._counts[place] += 1

    def remove(self, token_id: int) -> None:
        """The output loses a token that it had."""
        place = self._places[token_id]
        assert self._counts[place] > 0, f"token {token_id} is not in the output"
        self._counts[place] -= 1

    @property
    def token_ids(self) -> _Ids:
        """Tokens of the prompt, then others that the output has or had, each once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> _Floats:
        """How often the output has each of them; 0 for one that only the prompt has."""
        return self._counts[: len(self._places)]

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether each of them is in the prompt or the output."""
        return (self.counts > 0) | (np.arange(len(self._places)) < self._num_prompt)


@dataclass
class _Cells:
    """Cells of several rows, gathered row by row, and numbers for each of them."""

    rows: list[_Ids] = field(default_factory=list)
    token_ids: list[_Ids] = field(default_factory=list)
    columns: list[tuple[_Floats, ...]] = field(default_factory=list)

    def add(self, row: int, token_ids: _Ids, *columns: _Floats) -> None:
        self.rows.append(np.full(len(token_ids), row, dtype=np.int64))
        self.token_ids.append(token_ids)
        self.columns.append(columns)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and tokens, both [P]."""
        pair = np.stack((np.concatenate(self.rows), np.concatenate(self.token_ids)))
        rows, token_ids = torch.from_numpy(pair).to(device).unbind()
        return rows, token_ids

    def numbers(self, device: torch.device) -> tuple[Tensor, ...]:
        """The columns, each [P]."""
        table = np.stack([np.concatenate(column) for column in zip(*self.columns, strict=True)])
        return torch.from_numpy(table).to(device).unbind()


class LogitProcessors:
    """Gathers what the rows of one batch ask for, then changes their logits at once."""

    def __init__(self) -> None:
        self._penalties = _Cells()
        self._biases = _Cells()
        self._ruled_out = _Cells()
        self._masks: dict[int, npt.NDArray[np.bool_]] = {}

    def penalize(self, row: int, params: SamplingParams, counts: TokenCounts) -> None:
        """Ask for the penalties of a row."""
        ids, number = counts.token_ids, counts.counts
        divisor = np.where(counts.is_known, np.float32(params.repetition_penalty), np.float32(1))
        loss = np.float32(params.presence_penalty) * (number > 0) + np.float32(params.frequency_penalty) * number
        self._penalties.add(row, ids, divisor, loss.astype(np.float32))

    def bias(self, row: int, token_ids: _Ids, numbers: _Floats) -> None:
        """Ask for numbers to be added to the logits of tokens of a row, each token at most once."""
        self._biases.add(row, token_ids, numbers)

    def rule_out(self, row: int, token_ids: _Ids) -> None:
        """Ask that tokens of a row cannot be chosen."""
        self._ruled_out.add(row, token_ids)

    def allow_only(self, row: int, is_allowed: npt.NDArray[np.bool_]) -> None:
        """Ask that no other token of a row can be chosen; `is_allowed` is [V]."""
        self._masks[row] = is_allowed

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [N, V] after all of it: a copy, or the same tensor if nothing was asked for."""
        if not (self._penalties.rows or self._biases.rows or self._ruled_out.rows or self._masks):
            return logits
        logits, device = logits.clone(), logits.device
        if self._penalties.rows:
            cells = self._penalties.index(device)
            logits[cells] = penalized(logits[cells], *self._penalties.numbers(device))
        if self._biases.rows:
            cells = self._biases.index(device)
            (numbers,) = self._biases.numbers(device)
            logits[cells] = logits[cells] + numbers
        if self._ruled_out.rows:
            rows, token_ids = self._ruled_out.index(device)
            is_real = token_ids < logits.shape[-1]  # a stop token may be one that the model does not have
            logits[rows[is_real], token_ids[is_real]] = -torch.inf
        nothing = torch.tensor(-torch.inf, device=device)
        for row, is_allowed in self._masks.items():
            mask = torch.from_numpy(is_allowed).to(device)
            logits[row] = torch.where(mask, logits[row], nothing)
        return logits


def penalized(logits: Tensor, divisor: Tensor, loss: Tensor) -> Tensor:
    """Logits [P] after the repetition penalty (Keskar et al. 2019, CTRL, section 4.1), then what is subtracted."""
    return torch.where(logits > 0, logits / divisor, logits * divisor) - loss
