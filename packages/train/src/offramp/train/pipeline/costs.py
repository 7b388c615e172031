"""What modules cost for one micro-batch: floating-point operations and bytes of activations, from shapes alone.

Bytes are those that autograd keeps for this code in eager mode on CPU, counted module by module; a fused norm keeps one
[B, T, D] less. Biases, and running tensors of a single operation, are left out.

Legend: B batch, T time, N labelled tokens, D model, H query heads, K key/value heads, E head dim, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from offramp.common.exits.config import ExitConfig
from offramp.common.model.config import ModelConfig

FP32, BF16 = 4, 2  # bytes


@dataclass(frozen=True)
class MicroBatchShape:
    """What goes through the model at once.

    Attributes:
        rows: B.
        time: T.
        labelled_share: share of the B T positions that have a label; only they meet the unembedding.
        mixed: autocast to bf16 over fp32 weights, otherwise all in fp32.
    """

    rows: int
    time: int
    labelled_share: float = 1.0
    mixed: bool = False

    @property
    def tokens(self) -> int:
        """B T."""
        return self.rows * self.time

    @property
    def labelled(self) -> float:
        """N."""
        return self.tokens * self.labelled_share

    @property
    def compute_bytes(self) -> int:
        """Of one number in a matrix product."""
        return BF16 if self.mixed else FP32

    def state_bytes(self, hidden_size: int) -> int:
        """Of the states [B, T, D] between layers and stages, which stay in fp32."""
        return self.tokens * hidden_size * FP32


@dataclass(frozen=True)
class ModuleCost:
    """One module and micro-batch.

    Attributes:
        flops: of the forward pass; the backward pass has twice as many.
        held: bytes that wait for the backward pass.
        working: bytes alive at most while the module is computed and back-propagated, `held` among them.
    """

    flops: float
    held: float
    working: float


def layer_cost(config: ModelConfig, shape: MicroBatchShape, tensor: int = 1) -> ModuleCost:
    """One layer of the backbone, on each of `tensor` ranks that share it; sums among them are not counted."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    size, inner = config.hidden_size, config.intermediate_size
    seen = min(shape.time, config.sliding_window or shape.time)
    pairs = shape.tokens * seen / 2  # causal
    flops = 2 * shape.tokens * (size * (2 * queries + 2 * keys) + 3 * size * inner) + 4 * pairs * queries
    half = shape.compute_bytes
    shared = half * 4 * (queries + inner)  # q, repeated k and v, output; gate, its SiLU, up, their product
    shared += FP32 * config.num_heads  # log-sum-exp
    if config.qk_norm:
        shared += 2 * FP32 * (queries + keys) + FP32 * (config.num_heads + config.num_kv_heads)
    per_token = shared / tensor + 2 * _norm(size) + _inputs(size, 3, shape) + _inputs(size, 2, shape)
    if shape.mixed:
        per_token += BF16 * 4 * config.head_dim  # rotary tables, cast in every layer
    mask = half * shape.rows * shape.time**2  # additive, made in every layer from the one of the micro-batch
    held = shape.tokens * per_token + mask
    return ModuleCost(flops / tensor, held, held)


def summed_bytes(config: ModelConfig, shape: MicroBatchShape) -> float:
    """Bytes of states that tensor ranks sum in one layer and pass: after attention and after the feed-forward."""
    return 2.0 * shape.tokens * config.hidden_size * shape.compute_bytes


def head_cost(
    config: ModelConfig, exits: ExitConfig, layer: int, shape: MicroBatchShape, tensor: int = 1
) -> ModuleCost:
    """An exit head with its unembedding and loss, on each of `tensor` ranks; `layer` L is the final exit."""
    size, inner, labelled = config.hidden_size, config.intermediate_size, shape.labelled
    kind = "final" if layer == config.num_layers else exits.head
    per_token = 0.0 if kind == "bare" else float(_norm(size))
    # A bare head in fp32 keeps the selected states themselves.
    per_token += _inputs(size, 1, shape)
    flops, held = 2 * labelled * size * config.vocab_size / tensor, 0.0
    if kind == "adapter":
        flops += 2 * labelled * size * (size if exits.adapter_dim is None else 2 * exits.adapter_dim)
        if exits.adapter_dim is not None:
            per_token += shape.compute_bytes * 2 * exits.adapter_dim
        # Norm and projection, then what the scale by the state's root mean square keeps.
        per_token += _norm(size) + _inputs(size, 1, shape) + shape.compute_bytes * size
    elif kind == "mlp":
        flops += 2 * labelled * 3 * size * inner / tensor
        per_token += _norm(size) + _inputs(size, 2, shape) + shape.compute_bytes * 4 * inner / tensor
    elif kind == "block":
        block = layer_cost(config, shape, tensor)
        flops, held = flops + block.flops, held + block.held
    logits = FP32 * labelled * config.vocab_size / tensor
    held += labelled * per_token + logits
    # Back-propagation has the log-probabilities, their gradient and that of the logits at once.
    return ModuleCost(flops, held, held + 2 * logits)


def _norm(size: int) -> int:
    """Bytes per token that an RMS norm keeps: its input, the normalised input, and the root mean square."""
    return FP32 * (2 * size + 1)


def _inputs(size: int, readers: int, shape: MicroBatchShape) -> int:
    """Bytes per token of the input that `readers` projections keep; autocast makes a copy for each of them."""
    return BF16 * size * readers if shape.mixed else FP32 * size
