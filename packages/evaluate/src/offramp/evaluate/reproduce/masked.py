"""Masked keys and values: what a token that left early would have written in the layers above is not there at all.

The worst that can be done about skipped layers, and what filling is to be better than. No engine serves it, so answers
are made as naive generation makes them (`offramp.common.generation`): the whole target again for every token.

Legend: T time (target), L decoder layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import Generation
from offramp.common.t5.model import MultiExitT5


@torch.inference_mode()
def generate_masked(
    model: MultiExitT5, source_ids: Sequence[int], max_new_tokens: int, policy: ExitPolicy, eos_ids: Collection[int]
) -> Generation:
    """Greedy generation in which layer l of a later token sees only those earlier tokens that ran layer l.

    Everything else is as in `offramp.common.generation.generate`: the first token comes from all layers.
    """
    num_layers = model.config.num_layers
    encoded = model.encode(torch.tensor([list(source_ids)]))
    said = Generation()
    depths = [num_layers]  # of what the decoder reads: its start token first
    while len(said) < max_new_tokens and not (said.token_ids and said.token_ids[-1] in eos_ids):
        ids = torch.tensor([[model.config.decoder_start_token_id, *said.token_ids]])
        ran = torch.tensor([depths])
        state = model.embed(ids)
        token, layer = -1, 0
        while token < 0:
            layer += 1
            # Segment 0 is padding, which no other token sees; what becomes of its own state is never asked for.
            layout = model.layout(encoded, ids, (ran >= layer).long())
            previous, state = state, model.run_layers(state, layer - 1, layer, layout)
            wanted = layer == num_layers or (bool(said) and layer in policy.thresholds)
            if not wanted:
                continue
            logits = model.exit_logits(state, layer, layout)[0, -1:].float()
            best = int(logits.argmax())
            if layer < num_layers:
                sure = confidence(policy.measure, logits, state[0, -1:], previous[0, -1:], model.exit_classifier(layer))
                if not float(sure) > policy.threshold(layer, len(said), max_new_tokens):
                    continue
            token = best
        depths[-1] = layer
        depths.append(num_layers)
        said.append(token, layer)
    return said
