"""Naive generation: no cache, no batch, the whole model over the whole text for every token. Slow, obvious, the oracle.

Early exit with *saturated KV fill* is written here in one line: a token that left after layer e keeps its state above
e, and upper layers make its keys and values from that state (`Layout.exit_depths`).

Legend: T time, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from offramp.common.exits.confidence import confidence
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.attention import Layout
from offramp.common.model.transformer import MultiExitTransformer


@dataclass
class Generation:
    """Tokens generated, and for each the number of layers that were run to say it."""

    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)


@torch.inference_mode()
def generate(
    model: MultiExitTransformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    policy: ExitPolicy | None = None,
    eos_ids: Collection[int] = (),
    rope_length: int | None = None,
) -> Generation:
    """Greedy generation, one token at a time; ends after a token in `eos_ids`, which is part of the result.

    Args:
        model: in evaluation mode.
        prompt_ids: at least one token. The prompt never exits early, so the first new token comes from the full model.
        max_new_tokens: most tokens to generate.
        policy: exits to take; None runs the full model.
        eos_ids: tokens that end the text.
        rope_length: see `Layout.build`.
    """
    num_layers = model.config.num_layers
    result = Generation()
    token_ids, depths = list(prompt_ids), [num_layers] * len(prompt_ids)
    for step in range(max_new_tokens):
        taken = policy if step > 0 else None  # at step 0 the last token is the prompt's
        token, depth = _next_token(model, token_ids, depths, taken, step, max_new_tokens, rope_length)
        depths[-1] = depth
        token_ids.append(token)
        depths.append(num_layers)
        result.token_ids.append(token)
        result.exit_layers.append(depth)
        if token in eos_ids:
            break
    return result


def _next_token(
    model: MultiExitTransformer,
    token_ids: list[int],
    depths: list[int],
    policy: ExitPolicy | None,
    step: int,
    max_steps: int,
    rope_length: int | None,
) -> tuple[int, int]:
    """The token after the last one, and the layer it was said at."""
    device = model.embed_tokens.weight.device
    ids = torch.tensor([token_ids], device=device)
    layout = Layout.build(model.config, ids, None, torch.tensor([depths], device=device), rope_length)
    h, previous = model.embed(ids), None
    for layer in range(1, model.config.num_layers + 1):
        previous, h = h, model.run_layers(h, layer - 1, layer, layout)
        if policy is None or layer not in policy.thresholds or layer == model.config.num_layers:
            continue
        state = model.exit_state(h, layer, layout)[0, -1:]
        head = model.unembedding(layer)
        logits = None
        if policy.measure != "cosine":
            logits = F.linear(state, head if policy.shortlist is None else head[list(policy.shortlist)])
        sure = confidence(policy.measure, logits, h[0, -1:], previous[0, -1:])
        if float(sure) > policy.threshold(layer, step, max_steps):
            return int(F.linear(state, head).float().argmax()), layer
    return int(model.exit_logits(h[:, -1:], model.config.num_layers).float().argmax()), model.config.num_layers
