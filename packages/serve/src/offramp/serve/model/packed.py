"""The weights of a multi-exit model, packed once for the engine, and the forward on packed rows.

There is one definition of each family, in `offramp.common`; this is its second forward: layers run in ranges, with
query, key and value weights in one matrix, gate and up in another, and keys and values in the paged cache. How layers
themselves are packed is in `packing`.

Legend: N rows, D model, V vocabulary, C cache layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common.families import AnyConfig, AnyModel, check_dtype
from offramp.common.model.block import Block
from offramp.common.model.exit_head import ExitHead
from offramp.common.model.norm import RMSNorm
from offramp.serve import memory
from offramp.serve.config import Kernels, Quantization
from offramp.serve.devices import CPU, on_device
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.exit_transform import ExitTransform, HeadMeasure, cosine, exit_classifier
from offramp.serve.model.graphs import Capture
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.layers import ExitBlock
from offramp.serve.model.linear import ChosenKernels, PackedLinear, choose_kernels
from offramp.serve.model.packing import Packing, family_layers
from offramp.serve.model.rows import RowContext, Rows
from offramp.serve.model.unembedding import Unembedding

FILL_SLICE = 512
"""Most rows filled at once: their keys and values of all layers are in memory twice."""


def count_cache_layers(model: AnyModel) -> int:
    """C of a whole model: one for each layer, and one for each exit head with a block."""
    num_blocks = len(model.exit_config.layers) if model.exit_config.head == "block" else 0
    return model.config.num_layers + num_blocks


@dataclass(frozen=True)
class PackedExit:
    """One exit, the final one included.

    Attributes:
        layer: exit layer.
        block: the head's block, run on the cache; None if it has none.
        transform: the rest of the head: what comes before the unembedding.
        unembed: D -> V.
        weight: [V, D] that of the unembedding, plain, for shortlists.
        next_cache_layer: the first cache layer that a row which leaves here has to fill; the others follow it.
        classifier: the confidence measure of that name, of states [N, D]; None if the exit has none.
    """

    layer: int
    block: ExitBlock | None
    transform: ExitTransform
    unembed: Unembedding
    weight: Tensor
    next_cache_layer: int
    classifier: Callable[[Tensor], Tensor] | None = None


class PackedModel:
    """All weights of a model, and what they need of its configuration.

    Attributes:
        config: shape of the model.
        dtype: of weights and states.
        device: of weights and states.
        kernels: what computes the layers, the exits and their unembeddings.
        layers: the backbone, or the layers of a stage.
        exits: exit layer -> exit, ascending; the final one is the last. Of a stage those after its own layers.
        early_exits: the early exits of the whole model.
        num_cache_layers: C. An exit head with a block has a cache layer of its own, after that of its exit layer.
        has_exit_blocks: whether exit heads have blocks.
        has_exit_classifiers: whether early exits have classifiers.
        cosine: the confidence measure of that name, of states [N, D] and those before the layer.
    """

    def __init__(
        self,
        model: AnyModel,
        dtype: torch.dtype,
        kernels: Kernels = "auto",
        *,
        quantization: Quantization = "none",
        release: bool = False,
        final_shortlist: Sequence[int] | None = None,
        device: torch.device = CPU,
        capture: Capture | None = None,
        stage: range | None = None,
    ) -> None:
        """Pack.

        Args:
            model: weights; with `stage`, those of the stage (`pipeline.stages.stage_weights`) are enough.
            dtype: of weights and states.
            kernels: what is to compute them.
            quantization: what matrices are rounded to, all but the embeddings.
            release: give the model's own weights up as they are packed, so that they are not in memory twice; the model
                can then not be run any more.
            final_shortlist: the only tokens that the final exit predicts; None: all.
            device: of weights and states; torch computes them anywhere but on the CPU.
            capture: records the layers for few rows, see `GraphedLayers`; None: nothing is recorded.
            stage: pack a slice of the model: indices of its layers. Nothing can then be filled.

        Raises:
            OfframpError: if `kernels` is `native` and there are none here, or the model does not work in `dtype`.
        """
        check_dtype(model.config, dtype)
        # Rounded once: matrices that become int8 are taken as the model has them.
        model = (
            model if model.embed_tokens.weight.dtype == dtype else _cast(model, dtype, vectors=quantization == "int8")
        )
        if device.type != "cpu":
            model = (model if release else copy.deepcopy(model)).to(device)
        self._int8_for = dtype if quantization == "int8" else None
        config: AnyConfig = model.config
        self.config = config
        self.dtype, self.device = dtype, device
        self.kernels: ChosenKernels = choose_kernels(kernels, dtype) if device.type == "cpu" else "plain"
        family = family_layers(model, Packing(dtype, device, self.kernels, self._int8_for, release, capture))
        self._row_context = family.row_context
        self.cosine = cosine(self.kernels)
        span = range(config.num_layers) if stage is None else stage
        self._first_layer = span.start
        self._embedding: Tensor | None = None
        if not span.start:
            embedding = model.embed_tokens.weight.detach().to(dtype)
            # A checkpoint's own may be a file mapped into memory, of which each token needs another page.
            self._embedding = memory.moved(embedding) if device.type == "cpu" else embedding
            if release and model.embed_tokens.weight.dtype == dtype:
                model.embed_tokens.weight.data = self._embedding
        self.has_exit_blocks = model.exit_config.head == "block"
        self.has_exit_classifiers = model.exit_config.classifier
        self.early_exits = model.exit_config.layers
        heads = {e: cast(ExitHead, model.exits[str(e)]) for e in self.early_exits if e - 1 in span}
        backbone = list(model.layers)[span.start : span.stop]

        # Cache layers lie in the order in which a row passes them, so what an exit has to fill is one run to the end.
        order: list[nn.Module] = []
        layer_places: list[int] = []
        block_places: list[int] = []
        after_exit: dict[int, int] = {}
        for index, block in zip(span, backbone, strict=True):
            layer_places.append(len(order))
            order.append(block)
            head = heads.get(index + 1)
            if head is not None and head.block is not None:
                block_places.append(len(order))
                order.append(head.block)
            if head is not None:
                after_exit[index + 1] = len(order)
        self.num_cache_layers = len(order)
        starts = list(after_exit.values())
        self._fill = family.fill(order[starts[0] :], starts[0], starts) if starts and stage is None else None
        self._encoder = family.encoder()
        self.layers = family.layers(backbone, layer_places)
        exit_blocks: list[Block] = [head.block for head in heads.values() if head.block is not None]
        block_layers = family.layers(exit_blocks, block_places) if exit_blocks else None

        is_last = span.stop == config.num_layers
        shared = model.unembedding().detach()
        if model.output_scale != 1.0:
            # On the weight, so that exits need not know of it.
            shared = (shared.float() * model.output_scale).to(shared.dtype)
        # An earlier stage may have no exit that shares it, and then it is not there.
        unembed = self.unembedding(shared) if is_last or (heads and model.exit_config.tied) else None
        self.exits: dict[int, PackedExit] = {}
        for number, (layer, head) in enumerate(heads.items()):
            own = None if head.unembed is None else head.unembed.weight.detach()
            norm = model.norm if model.exit_config.head == "final" else head.norm
            self.exits[layer] = PackedExit(
                layer=layer,
                block=None if block_layers is None else ExitBlock(block_layers, number),
                transform=self._pack_transform(head, norm),
                unembed=cast(Unembedding, unembed) if own is None else self.unembedding(own),
                weight=shared if own is None else own,
                next_cache_layer=after_exit[layer],
                classifier=None if head.classifier is None else exit_classifier(head.classifier),
            )
        if not is_last:
            return
        if final_shortlist is not None:
            unembed = self.unembedding(shared, final_shortlist)
        last = self._pack_transform(None, model.norm)
        whole = cast(Unembedding, unembed)
        self.exits[span.stop] = PackedExit(span.stop, None, last, whole, shared, self.num_cache_layers)

    def unembedding(self, weight: Tensor, shortlist: Sequence[int] | None = None) -> Unembedding:
        """One that is computed as the model's own are.

        Args:
            weight: [V, D].
            shortlist: tokens, each once; None: all.
        """
        if shortlist is None:
            return Unembedding(self._linear(weight))
        tokens = torch.tensor(shortlist, device=weight.device)
        return Unembedding(self._linear(weight[tokens]), tokens, len(weight))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] on the model's device -> [N, D]."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding.index_select(0, token_ids)

    def row_context(self, max_model_len: int, block_size: int) -> RowContext:
        """What rows of this model share; sequences have at most `max_model_len` tokens."""
        return self._row_context(max_model_len, block_size)

    def encode(self, sources: Sequence[tuple[Sequence[int], Sequence[int]]], cache: KVStorage) -> None:
        """Read sources, and write the keys and values of cross-attention of all layers.

        Args:
            sources: token ids of each, and the blocks for them.
            cache: of the model.
        """
        assert self._encoder is not None, "there is no encoder"
        size = cache.block_size
        # Sources of one length are attended to together.
        ordered = sorted(sources, key=lambda source: len(source[0]))
        lengths = [len(token_ids) for token_ids, _ in ordered]
        slots = [
            (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)[:length]
            for (_, blocks), length in zip(ordered, lengths, strict=True)
        ]
        token_ids = np.concatenate([np.array(token_ids, dtype=np.int64) for token_ids, _ in ordered])
        x = self.embed(on_device(token_ids, self.device))
        self._encoder.write(x, lengths, on_device(np.concatenate(slots), self.device), cache)

    def run_layers(self, x: Tensor, rows: Rows, cache: KVStorage, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Run layers `start` + 1 .. `stop` of the backbone on states [N, D] that have been through `start` layers.

        Returns:
            The states [N, D], and those before the last of these layers. `x` itself stays as it is.
        """
        return self.layers.run(x, rows, cache, start - self._first_layer, stop - self._first_layer)

    def exit_state(self, layer: int, x: Tensor, rows: Rows, cache: KVStorage) -> Tensor:
        """State [N, D] that the unembedding of exit `layer` reads, from the rows' states after that layer."""
        point = self.exits[layer]
        return point.transform(x if point.block is None else point.block.run(x, rows, cache))

    def test_exit(
        self, layer: int, x: Tensor, rows: Rows, cache: KVStorage, unembed: Unembedding, measure: HeadMeasure
    ) -> tuple[Tensor, HeadOutput, Tensor]:
        """What `exit_state` gives, and what follows from it by an unembedding; see `ExitTransform.test`."""
        point = self.exits[layer]
        return point.transform.test(x if point.block is None else point.block.run(x, rows, cache), unembed, measure)

    def classify(self, layer: int, x: Tensor) -> Tensor:
        """How sure the classifier of exit `layer` is of states [N, D] after that layer: [N] fp32."""
        classifier = self.exits[layer].classifier
        assert classifier is not None, "the exit has no classifier"
        return classifier(x)

    def fill(self, layer: int, x: Tensor, rows: Rows, cache: KVStorage) -> None:
        """Write keys and values of all cache layers after exit `layer` from the states [N, D] that left there."""
        assert self._fill is not None, "there are no early exits"
        first = self.exits[layer].next_cache_layer
        if len(x) <= FILL_SLICE:
            self._fill.write(first, x, rows, cache)
            return
        for start in range(0, len(x), FILL_SLICE):
            places = np.arange(start, min(start + FILL_SLICE, len(x)))
            self._fill.write(first, x[start : start + FILL_SLICE], rows.select(places), cache)

    def _linear(self, weight: Tensor) -> PackedLinear:
        return PackedLinear(weight, kernels=self.kernels, int8_for=self._int8_for)

    def _pack_transform(self, head: ExitHead | None, norm: RMSNorm | None) -> ExitTransform:
        return ExitTransform(head, norm, self.config.rms_norm_eps, self.kernels, int8_for=self._int8_for)


def _cast(model: AnyModel, dtype: torch.dtype, *, vectors: bool) -> AnyModel:
    """A copy whose weights are of `dtype`; or only vectors, that is norms and biases."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if not vectors or parameter.dim() == 1:
            parameter.data = parameter.data.to(dtype)
    return model
