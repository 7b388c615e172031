"""The layers of a stage with what they cost, for both families.

Legend: B batch, T time, M source tokens, D model, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from offramp.common.families import AnyModel
from offramp.common.t5.model import MultiExitT5
from offramp.train.pipeline.costs import FP32, MicroBatchShape, ModuleCost, layer_cost, norm_bytes
from offramp.train.pipeline.stages import StagePlan
from offramp.train.pipeline.t5_costs import (
    decoder_layer_cost,
    decoder_shared_bytes,
    encoder_layer_cost,
    encoder_shared_bytes,
    scores_bytes,
)
from offramp.train.pipeline.times import ModuleTimes, Pass


class LayerRun(NamedTuple):
    """A layer of a stage, per micro-batch.

    Attributes:
        module: it.
        seconds: of its passes.
        cost: see `ModuleCost`.
        state: bytes of its input.
        depth: layers of the decoder that have run after it; those of an encoder are no depth.
        gathered: bytes of a gradient that all layers of its kind add up.
    """

    module: nn.Module
    seconds: Pass
    cost: ModuleCost
    state: float
    depth: int
    gathered: float = 0.0


def layer_runs(
    model: AnyModel, plan: StagePlan, index: int, shape: MicroBatchShape, times: ModuleTimes, tensor: int = 1
) -> list[LayerRun]:
    """The layers of a stage, in the order in which they run.

    Args:
        model: the whole of it.
        plan: how it is divided.
        index: of the stage.
        shape: of a micro-batch.
        times: of the modules.
        tensor: ranks that share each stage.
    """
    start, stop = plan.bounds[index], plan.bounds[index + 1]
    state = float(shape.state_bytes(model.config.hidden_size))
    if not isinstance(model, MultiExitT5):
        cost = layer_cost(model.config, shape, tensor)
        return [LayerRun(model.layers[i], times.layer, cost, state, i + 1) for i in range(start, stop)]
    config, encoder, source = model.config, model.encoder, float(shape.source_bytes(model.config.hidden_size))
    others, own = (_is_trained(one.relative_attention_bias) for one in (encoder, model))
    cost = encoder_layer_cost(config, shape, others)
    gathered = scores_bytes(config, shape, shape.source_time) * others
    runs = [
        LayerRun(encoder.layers[i], times.encoder_layer, cost, source, start, gathered)
        for i in range(plan.encoder_bounds[index], plan.encoder_bounds[index + 1])
    ]
    cost, gathered = decoder_layer_cost(config, shape, own), scores_bytes(config, shape, shape.time) * own
    return runs + [LayerRun(model.layers[i], times.layer, cost, state, i + 1, gathered) for i in range(start, stop)]


def shared_bytes(model: AnyModel, plan: StagePlan, index: int, shape: MicroBatchShape, checkpointed: bool) -> float:
    """What a stage keeps of a micro-batch beside its layers' own: what all of them read, and sources on their way.

    Args:
        model: the whole of it.
        plan: how it is divided.
        index: of the stage.
        shape: of a micro-batch.
        checkpointed: activations are.
    """
    if not isinstance(model, MultiExitT5):
        # Rotary tables, and the mask.
        return shape.tokens * 2 * model.config.head_dim * FP32 + shape.rows * shape.time**2
    config, encoder, source = model.config, model.encoder, float(shape.source_bytes(model.config.hidden_size))
    first, last = plan.encoder_bounds[index], plan.encoder_bounds[index + 1]
    # Every message but the last stage's holds the sources, too: the one that goes on waits for its gradient, and the
    # one that came is kept by decoder layers; those of the encoder count it as their input.
    found = source if index < plan.num_stages - 1 else 0.0
    if first < last:
        found += encoder_shared_bytes(config, shape, _is_trained(encoder.relative_attention_bias), checkpointed)
        found += shape.source_tokens * norm_bytes(config.hidden_size) if last == config.num_encoder_layers else 0.0
    else:
        found += source
    if plan.bounds[index] < plan.bounds[index + 1]:
        found += decoder_shared_bytes(config, shape, _is_trained(model.relative_attention_bias), checkpointed)
    return found


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
