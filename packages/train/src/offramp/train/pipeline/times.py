"""How long modules take on a micro-batch: from operations and a speed, measured here, or given.

Legend: B batch, T time, M source tokens, N labelled tokens, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offramp.common.exits.config import ExitConfig
from offramp.common.families import AnyConfig
from offramp.common.model.attention import Layout
from offramp.common.model.block import Block
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.layout import BatchLayout
from offramp.common.model.norm import RMSNorm
from offramp.common.t5.attention import RelativeAttentionBias
from offramp.common.t5.block import DecoderBlock, EncoderBlock
from offramp.common.t5.config import T5Config
from offramp.common.t5.layout import Encoded, TargetLayout, source_mask
from offramp.train.linear_cross_entropy import linear_cross_entropy
from offramp.train.losses import ExitReader
from offramp.train.pipeline.costs import MicroBatchShape, head_cost, layer_cost
from offramp.train.pipeline.t5_costs import decoder_layer_cost, encoder_layer_cost

BACKWARD_PER_FORWARD = 2.0
"""A backward pass makes two matrix products for each of the forward pass."""


class Pass(NamedTuple):
    """Seconds of one module and micro-batch."""

    forward: float
    backward: float


NO_TIME = Pass(0.0, 0.0)


@dataclass(frozen=True)
class GivenTimes:
    """Times in seconds per micro-batch that the user knows; None is unknown.

    A backward pass that is not given takes twice its forward pass, if that is given.

    Attributes:
        embedding_forward: of the look-up.
        embedding_backward: of its gradient.
        layer_forward: of one layer.
        layer_backward: of one layer; of the decoder, where there is an encoder.
        encoder_layer_forward: of one layer of the encoder.
        encoder_layer_backward: of one layer of the encoder.
        exit_forward: of one early exit: head, unembedding and loss.
        exit_backward: of one early exit.
        final_forward: of the final norm, unembedding and loss.
        final_backward: of the same.
        transfer: of states or gradients to a neighbouring stage.
    """

    embedding_forward: float | None = None
    embedding_backward: float | None = None
    layer_forward: float | None = None
    layer_backward: float | None = None
    encoder_layer_forward: float | None = None
    encoder_layer_backward: float | None = None
    exit_forward: float | None = None
    exit_backward: float | None = None
    final_forward: float | None = None
    final_backward: float | None = None
    transfer: float | None = None

    def over(self, name: str, known: Pass) -> Pass:
        """What is given about a module, over what was known."""
        forward: float | None = getattr(self, f"{name}_forward")
        backward: float | None = getattr(self, f"{name}_backward")
        if backward is None:
            backward = known.backward if forward is None else BACKWARD_PER_FORWARD * forward
        return Pass(known.forward if forward is None else forward, backward)


@dataclass(frozen=True)
class ModuleTimes:
    """Of all modules.

    Attributes:
        embedding: look-up of a micro-batch.
        layer: one layer (of the decoder, where there is an encoder); all are alike.
        heads: exit layer -> its head, unembedding and loss; the final exit last.
        transfer: seconds that states or gradients are on the way to a neighbour.
        source: where these numbers come from, in words.
        encoder_layer: one layer of the encoder; nothing without one.
    """

    embedding: Pass
    layer: Pass
    heads: dict[int, Pass]
    transfer: float
    source: str
    encoder_layer: Pass = NO_TIME

    def shared_by(self, tensor: int) -> ModuleTimes:
        """Of modules that so many ranks share evenly; sums among them take no time here."""
        if tensor == 1:
            return self

        def share(whole: Pass) -> Pass:
            return Pass(whole.forward / tensor, whole.backward / tensor)

        heads = {layer: share(whole) for layer, whole in self.heads.items()}
        return replace(self, layer=share(self.layer), heads=heads)

    def with_given(self, given: GivenTimes) -> ModuleTimes:
        """These times, but for what the user has given."""
        if given == GivenTimes():
            return self
        *early, last = self.heads
        heads = {layer: given.over("exit", self.heads[layer]) for layer in early}
        heads[last] = given.over("final", self.heads[last])
        return replace(
            self,
            embedding=given.over("embedding", self.embedding),
            layer=given.over("layer", self.layer),
            encoder_layer=given.over("encoder_layer", self.encoder_layer),
            heads=heads,
            transfer=self.transfer if given.transfer is None else given.transfer,
            source=f"given, and what is not given {self.source}",
        )


def transfer_seconds(config: AnyConfig, shape: MicroBatchShape, bytes_per_second: float | None) -> float:
    """Of one message between stages; 0 where the link is not known."""
    size = config.hidden_size
    return 0.0 if bytes_per_second is None else (shape.state_bytes(size) + shape.source_bytes(size)) / bytes_per_second


def estimated(
    config: AnyConfig,
    exits: ExitConfig,
    shape: MicroBatchShape,
    flops_per_second: float,
    source: str,
    transfer: float = 0.0,
    tensor: int = 1,
) -> ModuleTimes:
    """Operations over speed; the look-up in the embedding is free.

    Args:
        config: the model.
        exits: its early exits.
        shape: of a micro-batch.
        flops_per_second: that the device reaches on such matrices, not its maker's peak.
        source: see `ModuleTimes`.
        transfer: see `ModuleTimes`.
        tensor: ranks that share each module.
    """

    def seconds(flops: float) -> Pass:
        forward = flops / flops_per_second
        return Pass(forward, BACKWARD_PER_FORWARD * forward)

    heads = {
        layer: seconds(head_cost(config, exits, layer, shape, tensor).flops)
        for layer in (*exits.layers, config.num_layers)
    }
    if isinstance(config, T5Config):
        layer, encoder_layer = decoder_layer_cost(config, shape).flops, encoder_layer_cost(config, shape).flops
    else:
        layer, encoder_layer = layer_cost(config, shape, tensor).flops, 0.0
    return ModuleTimes(NO_TIME, seconds(layer), heads, transfer, source, seconds(encoder_layer))


def matrix_speed(device: torch.device, mixed: bool, size: int = 1024) -> float:
    """Floating-point operations per second of a square matrix product, measured: the best of a few."""
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if mixed else torch.float32)
    return 2.0 * size**3 / min(_timed(lambda: matrix @ matrix, device) for _ in range(5))


def profiled(
    config: AnyConfig,
    exits: ExitConfig,
    shape: MicroBatchShape,
    device: torch.device,
    transfer: float = 0.0,
    repeats: int = 3,
) -> ModuleTimes:
    """Run one layer of each kind, the embedding and one head of each kind on a micro-batch, and take medians.

    Needs memory for these modules and one micro-batch, not for the model.
    """
    with torch.device(device):
        rows, size = shape.rows, config.hidden_size
        ids = torch.randint(0, config.vocab_size, (rows, shape.time))
        mask = torch.rand(rows, shape.time) < shape.labelled_share
        mask[0, 0] = True
        labels = ids[mask]
        states = torch.randn(rows, shape.time, size, requires_grad=True)
        embedding = nn.Embedding(config.vocab_size, size)
        unembedding = nn.Parameter(torch.randn(config.vocab_size, size) * size**-0.5)
        norm = RMSNorm(size, config.rms_norm_eps)
        final = ExitReader(None, norm, unembedding)
        early = None
        if exits.layers:
            head = ExitHead(config, exits)
            own = unembedding if head.unembed is None else head.unembed.weight
            early = ExitReader(head, norm if exits.head == "final" else None, own)

        # Of rows that hold a single text each.
        segments = torch.ones_like(ids)
        layout: BatchLayout
        if isinstance(config, T5Config):
            sources = torch.randn(rows, shape.source_time, size, requires_grad=True)
            known = torch.ones(rows, shape.source_time, dtype=torch.long)
            encoder, block = EncoderBlock(config), DecoderBlock(config)
            # Biases are made once for all layers, and cut off what they are made of, as on a stage.
            encoder_bias, bias = (RelativeAttentionBias(config, both_ways=both) for both in (True, False))
            seen = source_mask(encoder_bias, shape.source_time, known).detach().requires_grad_()
            made = TargetLayout.build(bias, Encoded(sources, known), shape.time, segments)
            layout = replace(made, self_mask=made.self_mask.detach().requires_grad_())
        else:
            encoder = sources = seen = None
            layout, block = Layout.build(config, ids, segments), Block(config)

    def measured(run: Callable[[], Tensor]) -> Pass:
        return _profile(run, shape.mixed, device, repeats)

    def loss(reader: ExitReader) -> Callable[[], Tensor]:
        return lambda: linear_cross_entropy(reader.state(states, mask, layout), reader.unembedding, labels).loss

    heads = {} if early is None else dict.fromkeys(exits.layers, measured(loss(early)))
    return ModuleTimes(
        embedding=measured(lambda: embedding(ids)),
        layer=measured(lambda: block(states, layout)),
        heads={**heads, config.num_layers: measured(loss(final))},
        transfer=transfer,
        source=f"measured on this machine ({device.type}, {torch.get_num_threads()} threads)",
        encoder_layer=NO_TIME if encoder is None else measured(lambda: encoder(sources, seen)),
    )


def _profile(run: Callable[[], Tensor], mixed: bool, device: torch.device, repeats: int) -> Pass:
    forward, backward = [], []
    for _ in range(repeats + 1):  # the first one warms up
        outputs: list[Tensor] = []
        autocast = torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext()
        with autocast:
            forward.append(_timed(lambda: outputs.append(run()), device))  # noqa: B023 - runs at once
        gradient = torch.ones_like(outputs[0])
        backward.append(_timed(lambda: outputs[0].backward(gradient), device))  # noqa: B023 - runs at once
    return Pass(statistics.median(forward[1:]), statistics.median(backward[1:]))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
