"""Floating-point operations that a step needs: those of the model and its exits, however they are computed.

The number is that of *model FLOPs utilisation* (PaLM, Chowdhery et al. 2022, appendix B): operations of matrix products
and of causal attention in the forward pass, one more time for the gradient of the weights and one more for that of the
input, where there is something to train. What a run computes beside that (checkpointed activations a second time, whole
logits tables of padding) is not counted, so it lowers the utilisation. Layers that rows skip and rows that go only part
of the way through a pipeline are counted whole.

Legend: B batch, T time, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from offramp.common.exits.config import ExitConfig
from offramp.common.model.config import ModelConfig
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.pipeline.costs import MicroBatchShape, head_cost, layer_cost


@dataclass(frozen=True)
class ModelFlops:
    """What a step of one model needs, from shapes and from which of its parameters are trained.

    Attributes:
        config: of the model.
        exits: its early exits.
        layers: [L] how often each layer's forward pass counts: 1 alone, 3 with both gradients.
        heads: exit layer -> the same of its head with the unembedding.
    """

    config: ModelConfig
    exits: ExitConfig
    layers: tuple[float, ...]
    heads: Mapping[int, float]

    @classmethod
    def of(cls, model: MultiExitTransformer) -> ModelFlops:
        """Of a whole model, or of one whose upper layers were dropped."""
        # Layers and heads start with a norm, whose gradient comes through all the rest of them.
        flows = _trained_share(model.embed_tokens.parameters()) > 0.0
        layers: list[float] = []
        flowing: list[bool] = []  # whether a gradient of the state after each layer is wanted
        for block in model.layers:
            share = _trained_share(block.parameters())
            flows = flows or share > 0.0
            layers.append(1.0 + share + flows)
            flowing.append(flows)
        heads: dict[int, float] = {}
        for layer in (one for one in model.exit_layers if one <= model.depth):
            unembedding = model.unembedding(layer)
            own = [] if layer == model.config.num_layers else list(model.exits[str(layer)].parameters())
            own = [parameter for parameter in own if parameter is not unembedding]
            if layer == model.config.num_layers or model.exit_config.head == "final":
                own += model.norm.parameters()
            inward = flowing[layer - 1] or _trained_share(own) > 0.0
            heads[layer] = 1.0 + _trained_share([*own, unembedding]) + inward
        return cls(model.config, model.exit_config, tuple(layers), heads)

    def of_step(self, positions: float, time: int, depth: int, trained: Mapping[int, float]) -> float:
        """Operations of a step.

        Args:
            positions: B T of the whole global batch, prompts and padding included.
            time: T.
            depth: layers that run.
            trained: exit layer -> tokens that it is trained on; exits without any are not computed.
        """
        if not positions:
            return 0.0
        flops = layer_cost(self.config, MicroBatchShape(1, time)).flops * positions / time * sum(self.layers[:depth])
        for layer, count in trained.items():
            if count and layer in self.heads:
                row = MicroBatchShape(1, time, labelled_share=count / positions)
                flops += head_cost(self.config, self.exits, layer, row).flops * positions / time * self.heads[layer]
        return flops


def _trained_share(parameters: Iterable[Tensor]) -> float:
    """Of numbers; so of operations, as each weight of a matrix takes part in as many."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    whole = sum(size for size, _ in sizes)
    return sum(size for size, trained in sizes if trained) / whole if whole else 0.0
