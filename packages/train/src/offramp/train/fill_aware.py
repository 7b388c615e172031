"""Token-wise random exit depths: train on the KV cache that serving will see.

When a token leaves at layer e, serving with the *fill* KV policy makes its keys and values above e from the state at e.
A model that never saw such a cache drifts, even where the exit itself was right. So here some target tokens are frozen
at random exits while training (`Layout.exit_depths`), and later tokens learn to attend to what is left of them.

Legend: B batch, T time, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.train.data.batch import AnyBatch
from offramp.train.row_draws import row_generator


def check_probabilities(probabilities: Mapping[int, float], exit_layers: tuple[int, ...]) -> None:
    """Raise `OfframpError` unless these are probabilities of early exits that the model has.

    Args:
        probabilities: exit layer -> probability that a token leaves there.
        exit_layers: early exits of the model.
    """
    if unknown := sorted(set(probabilities) - set(exit_layers)):
        raise OfframpError(f"fill_aware names layers {unknown}, but the model has early exits at {list(exit_layers)}.")
    if min(probabilities.values(), default=0.0) < 0.0 or sum(probabilities.values()) > 1.0:
        raise OfframpError(f"fill_aware {dict(probabilities)} must be probabilities that add up to at most 1.")


def draw_exit_depths(
    batch: AnyBatch, probabilities: Mapping[int, float], num_layers: int, seed: int, step: int
) -> Tensor:
    """[B, T] int64: after how many layers each token's state is frozen; `num_layers` is not at all.

    Only tokens that a served model would have generated are frozen: those with a label whose predecessor in the same
    segment has one too. (The last prompt token also predicts a target, but a prompt never exits.)

    A row's draw depends on `seed`, `step` and the row's tokens alone. So all stages of a pipeline agree without a word,
    and it does not matter how a batch is split into micro-batches and ranks.

    Args:
        batch: the rows.
        probabilities: exit layer -> probability.
        num_layers: L.
        seed: of the run.
        step: optimizer step.
    """
    layers = sorted(probabilities)
    edges = torch.tensor([probabilities[layer] for layer in layers], dtype=torch.float64).cumsum(0)
    depths = torch.tensor([*layers, num_layers])
    draws = torch.stack(
        [torch.rand(row.shape, generator=row_generator(row, seed, step)) for row in batch.input_ids.cpu()]
    )
    drawn = depths[torch.bucketize(draws.double(), edges, right=True)].to(batch.labels.device)
    return torch.where(batch.generated(), drawn, num_layers)
