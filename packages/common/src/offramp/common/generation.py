"""Naive generation: no cache, no batch, the whole model over the whole text for every token. Slow, obvious, the oracle.

What a KV policy means is plain where nothing is cached:

- `fill`: a token that left after layer e keeps its state above e, and upper layers make its keys and values from that
  state (`Layout.exit_depths`).
- `recompute`: every token's keys and values are those of the full model; exits only decide which layer says a token.
- `pipeline`: the same, and nothing ever has to wait for a pass through all layers.
- `verify`: exits only propose tokens; the full model says them all.
- `static`: one layer says every token, so nobody ever looks above it.
- `full`: the last layer says every token.

An encoder-decoder model reads its prompt once, as the source. What it writes begins with the token its decoder starts
with, which runs all layers as a prompt does.

Legend: T time, D model, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from offramp.common.exits.confidence import confidence
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import STATE_MEASURES, ExitPolicy
from offramp.common.model.attention import Layout
from offramp.common.model.multi_exit import MultiExitDecoder
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.t5.model import MultiExitT5


@dataclass
class Generation:
    """Tokens generated, and for each the number of layers that were run to say it."""

    token_ids: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int, exit_layer: int) -> None:
        """One more token."""
        self.token_ids.append(token_id)
        self.exit_layers.append(exit_layer)


def generate(
    model: MultiExitTransformer | MultiExitT5,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    kv_policy: KVPolicy = "fill",
    policy: ExitPolicy | None = None,
    max_pending: int = 8,
    static_layer: int | None = None,
    eos_ids: Collection[int] = (),
    rope_length: int | None = None,
) -> Generation:
    """Greedy generation, one token at a time; ends after a token in `eos_ids`, which is part of the result.

    Args:
        model: in evaluation mode.
        prompt_ids: at least one token; an encoder-decoder model's source. The prompt never exits early, so the first
            new token comes from the full model.
        max_new_tokens: most tokens to generate.
        kv_policy: what upper layers see of a token that left early, and so what an early exit may change.
        policy: exits to take; None runs the full model. Not asked under `full` and `static`.
        max_pending: `recompute` and `verify`: once this many tokens have left early since the last token that ran all
            layers, the next runs all layers.
        static_layer: `static`: the exit that says every token after the first.
        eos_ids: tokens that end the text.
        rope_length: see `Layout.build`.

    Returns:
        Tokens and exit layers. Under `verify` a token that an exit proposed counts as said there, and one that the full
        model had to say itself as said at the last layer.
    """
    if kv_policy == "full":
        policy = None
    elif kv_policy == "static":
        assert static_layer is not None
        policy = ExitPolicy("cosine", {static_layer: -math.inf})  # any confidence will do
    if policy is not None:
        policy.check_measure(has_classifiers=model.exit_config.classifier)
    text = _text(model, list(prompt_ids), max_new_tokens, frozenset(eos_ids), rope_length)
    if kv_policy == "verify":
        return _verified(text, policy, max_pending)
    if kv_policy == "recompute":
        return _generated(text, policy, keeps_states=False, max_pending=max_pending)
    return _generated(text, policy, keeps_states=kv_policy == "fill")


@dataclass(frozen=True)
class _Text:
    """What is to be continued, and when it ends.

    Attributes:
        model: that continues it.
        prompt: tokens [P] it begins with.
        max_new_tokens: most tokens that follow.
        eos_ids: tokens that end it.
        lay_out: the layout of tokens [1, T] with the depths [1, T] at which they are frozen.
    """

    model: MultiExitDecoder[Any, Any]
    prompt: list[int]
    max_new_tokens: int
    eos_ids: frozenset[int]
    lay_out: Callable[[Tensor, Tensor | None], Any]

    def is_complete(self, new: Sequence[int]) -> bool:
        """Whether nothing follows these new tokens."""
        return len(new) >= self.max_new_tokens or (bool(new) and new[-1] in self.eos_ids)


@torch.inference_mode()
def _text(
    model: MultiExitTransformer | MultiExitT5,
    prompt: list[int],
    max_new_tokens: int,
    eos_ids: frozenset[int],
    rope_length: int | None,
) -> _Text:
    if isinstance(model, MultiExitTransformer):
        config = model.config
        return _Text(
            model,
            prompt,
            max_new_tokens,
            eos_ids,
            lambda ids, depths: Layout.build(config, ids, None, depths, rope_length),
        )
    encoded = model.encode(torch.tensor([prompt], device=model.embed_tokens.weight.device))
    start = [model.config.decoder_start_token_id]
    return _Text(
        model, start, max_new_tokens, eos_ids, lambda ids, depths: model.layout(encoded, ids, exit_depths=depths)
    )


def _generated(
    text: _Text, policy: ExitPolicy | None, *, keeps_states: bool, max_pending: float = math.inf
) -> Generation:
    """Every token is said where its exit was sure.

    Args:
        text: to continue.
        policy: exits to take.
        keeps_states: whether a token that left early keeps its state in the layers above, or they run on it later.
        max_pending: most tokens in a row that leave early.
    """
    num_layers = text.model.config.num_layers
    said = Generation()
    depths = [num_layers] * len(text.prompt)  # how deep each token went to say the next one
    num_pending = 0
    while not text.is_complete(said.token_ids):
        must_run_through = not said or num_pending >= max_pending  # at first the newest token is the prompt's
        token, layer = _next_token(
            text, said.token_ids, None if must_run_through else policy, depths if keeps_states else None
        )
        num_pending = num_pending + 1 if layer < num_layers else 0
        depths[-1] = layer
        depths.append(num_layers)
        said.append(token, layer)
    return said


def _verified(text: _Text, policy: ExitPolicy | None, max_pending: int) -> Generation:
    """Exits draft tokens until one pass runs through all layers; it judges what was drafted (self-speculation).

    A draft is kept if the full model says the same after the same text. The first that is not is replaced by what the
    full model says, and what was drafted after it is forgotten. If all are kept, the pass that judges adds the token
    after them. So every pass through all layers yields at least one token of its own.

    Drafts are judged, so they come from the shortlist alone where there is one (`ExitPolicy.shortlist_only`).
    """
    num_layers = text.model.config.num_layers
    if policy is not None and policy.shortlist is not None:
        policy = replace(policy, shortlist_only=True)
    said, drafts = Generation(), Generation()
    while not text.is_complete(said.token_ids):
        so_far = said.token_ids + drafts.token_ids
        # A draft that would end the text must be judged before anything can follow it.
        must_run_through = not so_far or len(drafts) >= max_pending or text.is_complete(so_far)
        token, layer = _next_token(text, so_far, None if must_run_through else policy)
        drafts.append(token, layer)
        if layer < num_layers:
            continue
        for draft, drafted_at in zip(drafts.token_ids, drafts.exit_layers, strict=True):
            token, _ = _next_token(text, said.token_ids, policy=None)
            said.append(token, drafted_at if token == draft else num_layers)
            if token != draft or text.is_complete(said.token_ids):
                break
        drafts = Generation()
    return said


@torch.inference_mode()
def _next_token(
    text: _Text, new: list[int], policy: ExitPolicy | None, depths: list[int] | None = None
) -> tuple[int, int]:
    """The token after the prompt and `new`, and the layer that says it.

    Args:
        text: prompt and limits.
        new: tokens generated so far.
        policy: exits to take.
        depths: for each token read, the layer after which its state stays as it is; None: none is kept.
    """
    model, num_layers = text.model, text.model.config.num_layers
    device = model.embed_tokens.weight.device
    ids = torch.tensor([text.prompt + new], device=device)
    frozen = None if depths is None else torch.tensor([depths], device=device)
    layout = text.lay_out(ids, frozen)
    h = model.embed(ids)
    for layer in range(1, num_layers):
        previous, h = h, model.run_layers(h, layer - 1, layer, layout)
        if policy is None or layer not in policy.thresholds:
            continue
        logits = model.exit_logits(h, layer, layout)[0, -1:].float()
        best = int(logits.argmax())
        listed = best
        if policy.shortlist is not None and (policy.measure not in STATE_MEASURES or policy.shortlist_only):
            logits = logits[:, list(policy.shortlist)]
            listed = policy.shortlist[int(logits.argmax())]
        sure = confidence(policy.measure, logits, h[0, -1:], previous[0, -1:], model.exit_classifier(layer))
        is_sure = float(sure) > policy.threshold(layer, len(new), text.max_new_tokens)
        if is_sure and (listed == best or policy.shortlist_only):
            return listed, layer
    h = model.run_layers(h, num_layers - 1, num_layers, layout)
    return int(model.exit_logits(h[:, -1:], num_layers).float().argmax()), num_layers
