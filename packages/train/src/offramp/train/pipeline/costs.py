"""What modules cost for one micro-batch: floating-point operations and bytes of activations, from shapes alone.

Bytes are those of this code in eager mode on CPU, counted module by module: what autograd keeps, and the largest
tensors that come on top while a module is back-propagated. A fused norm keeps one [B, T, D] less. Biases, and what else
lives within a single operation, are left out.

Legend: B batch, T time, M source tokens, N labelled tokens, D model, H query heads, K key/value heads, E head dim,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from offramp.common.exits.config import ExitConfig
from offramp.common.families import AnyConfig
from offramp.common.model.config import ModelConfig
from offramp.train.linear_cross_entropy import CHUNK_ROWS, PRODUCT_ROWS

FP32, BF16 = 4, 2  # bytes


@dataclass(frozen=True)
class MicroBatchShape:
    """What goes through the model at once.

    Attributes:
        rows: B.
        time: T.
        labelled_share: share of the B T positions that have a label; only they meet the unembedding.
        mixed: autocast to bf16 over fp32 weights, otherwise all in fp32.
        source_time: M, tokens that an encoder reads in each row; 0 without one.
    """

    rows: int
    time: int
    labelled_share: float = 1.0
    mixed: bool = False
    source_time: int = 0

    @property
    def tokens(self) -> int:
        """B T."""
        return self.rows * self.time

    @property
    def source_tokens(self) -> int:
        """B M."""
        return self.rows * self.source_time

    @property
    def positions(self) -> int:
        """B (M + T): tokens of both sides."""
        return self.tokens + self.source_tokens

    def describe(self) -> str:
        """In words."""
        source = f"({self.source_time} source + {self.time} target)" if self.source_time else f"{self.time}"
        return f"{self.rows} x {source} tokens"

    @property
    def labelled(self) -> float:
        """N."""
        return self.tokens * self.labelled_share

    @property
    def compute_bytes(self) -> int:
        """Of one number in a matrix product."""
        return BF16 if self.mixed else FP32

    def state_bytes(self, hidden_size: int) -> int:
        """Of the states [B, T, D] between layers, which stay in fp32."""
        return self.tokens * hidden_size * FP32

    def source_bytes(self, hidden_size: int) -> int:
        """Of those [B, M, D] of sources; between stages both go together."""
        return self.source_tokens * hidden_size * FP32


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
    per_token = shared / tensor + 2 * norm_bytes(size) + inputs_bytes(size, 3, shape) + inputs_bytes(size, 2, shape)
    if shape.mixed:
        per_token += BF16 * 4 * config.head_dim  # rotary tables, cast in every layer
    mask = half * shape.rows * shape.time**2  # additive, made in every layer from the one of the micro-batch
    held = shape.tokens * per_token + mask
    return ModuleCost(flops / tensor, held, held + _feed_forward(config, shape, shape.tokens, tensor))


def summed_bytes(config: AnyConfig, shape: MicroBatchShape) -> float:
    """Bytes of states that tensor ranks sum in one layer and pass: after attention and after the feed-forward."""
    return 2.0 * shape.tokens * config.hidden_size * shape.compute_bytes


def head_cost(
    config: AnyConfig,
    exits: ExitConfig,
    layer: int,
    shape: MicroBatchShape,
    tensor: int = 1,
    *,
    whole_logits: bool = False,
    trained: bool = True,
) -> ModuleCost:
    """An exit head with its unembedding and loss.

    Args:
        config: the model.
        exits: its early exits.
        layer: exit layer; L is the final exit.
        shape: of a micro-batch.
        tensor: ranks that share it; the cost is that of each.
        whole_logits: all logits at once, in place of a few rows at a time (`linear_cross_entropy`).
        trained: the unembedding is, and wants a gradient.
    """
    size, inner, labelled = config.hidden_size, config.intermediate_size, shape.labelled
    kind = "final" if layer == config.num_layers else exits.head
    per_token = 0.0 if kind == "bare" else float(norm_bytes(size))
    # A bare head in fp32 keeps the selected states themselves.
    per_token += inputs_bytes(size, 1, shape)
    flops, held, transform = 2 * labelled * size * config.vocab_size / tensor, 0.0, 0.0
    if kind == "adapter":
        flops += 2 * labelled * size * (size if exits.adapter_dim is None else 2 * exits.adapter_dim)
        if exits.adapter_dim is not None:
            per_token += shape.compute_bytes * 2 * exits.adapter_dim
        # Norm and projection, then what the scale by the state's root mean square keeps.
        per_token += norm_bytes(size) + inputs_bytes(size, 1, shape) + shape.compute_bytes * size
    elif kind == "mlp":
        flops += 2 * labelled * 3 * size * inner / tensor
        per_token += norm_bytes(size) + inputs_bytes(size, 2, shape) + shape.compute_bytes * 4 * inner / tensor
        transform = _feed_forward(config, shape, labelled, tensor)
    elif kind == "block":
        assert isinstance(config, ModelConfig)
        block = layer_cost(config, shape, tensor)
        flops, held, transform = flops + block.flops, block.held, block.working - block.held
    held += labelled * per_token
    state = shape.state_bytes(size)  # its gradient
    if whole_logits:
        logits = FP32 * labelled * config.vocab_size / tensor
        # Back-propagation has the log-probabilities, their gradient and that of the logits at once.
        return ModuleCost(flops, held + logits, held + max(3 * logits, transform + state))
    weight = size * config.vocab_size / tensor if trained else 0.0
    chunk = min(labelled, CHUNK_ROWS * tensor) * config.vocab_size / tensor
    wide, narrow, rows = FP32 * weight, shape.compute_bytes * weight, labelled * shape.compute_bytes * size
    cast = part = 0.0
    if shape.mixed:
        # The converted unembedding, and the states before they were converted.
        cast = BF16 * size * config.vocab_size / tensor + FP32 * labelled * size
        part = BF16 * (chunk + min(weight, PRODUCT_ROWS * size))
    # The sum over chunks; beside it logits and log-probabilities, then the error in the type of the products.
    making = wide + cast + 2 * FP32 * chunk + part + rows
    converting = wide + cast + narrow + rows if shape.mixed else 0.0
    # What was made along with the loss, and beside it the same scaled, and converted to the type of the parameter.
    scaling = narrow + wide + rows
    return ModuleCost(flops, held + narrow, held + max(making, converting, scaling, transform + state))


def embedding_working(config: AnyConfig, tensor: int = 1) -> float:
    """Bytes of the gradient of the embedding [V, D], before it is added to those of earlier micro-batches."""
    return FP32 * config.vocab_size * config.hidden_size / tensor


def _feed_forward(config: AnyConfig, shape: MicroBatchShape, tokens: float, tensor: int) -> float:
    """Bytes on top of what is held while a feed-forward of so many tokens is back-propagated, the most of a layer.

    That is the gradient [N, D] that came in, and two of [N, F]; or one of them and that of a matrix [D, F].
    """
    size, inner = config.hidden_size, config.intermediate_size / tensor
    narrow = BF16 * size * tokens if shape.mixed else 0.0  # the gradient that came in, converted
    matrix = shape.compute_bytes * inner * max(tokens, size)
    return FP32 * size * tokens + narrow + shape.compute_bytes * inner * tokens + matrix


def norm_bytes(size: int) -> int:
    """Bytes per token that an RMS norm keeps: its input, the normalised input, and the root mean square."""
    return FP32 * (2 * size + 1)


def inputs_bytes(size: int, readers: int, shape: MicroBatchShape) -> int:
    """Bytes per token of the input that `readers` projections keep; autocast makes a copy for each of them."""
    return BF16 * size * readers if shape.mixed else FP32 * size
