"""What layers of a T5 cost for one micro-batch, as `costs` says it of decoder-only ones: from shapes alone.

Where the relative bias is trained, scores want a gradient, and attention with one keeps its probabilities; where it is
frozen a fused kernel keeps none. Cross-attention has no bias, so it is always the latter.

Legend: B batch, T time (target), M source tokens, D model, H heads, E head dim, F feed-forward, W = H E.
"""

from __future__ import annotations

from offramp.common.t5.config import T5Config
from offramp.train.pipeline.costs import BF16, FP32, MicroBatchShape, ModuleCost, inputs_bytes, norm_bytes

INDEX = 8
"""Bytes of a class of distances."""


def encoder_layer_cost(config: T5Config, shape: MicroBatchShape, trained_bias: bool = True) -> ModuleCost:
    """One layer of the encoder; every source token sees all M.

    Args:
        config: the model.
        shape: of a micro-batch.
        trained_bias: the encoder's relative bias is.
    """
    tokens = shape.source_tokens
    flops = _attention_flops(config, tokens, tokens * shape.source_time) + _feed_forward_flops(config, tokens)
    later = _feed_forward(config, shape, tokens)
    held = _self_attention(config, shape, shape.source_time, trained_bias) + later
    return ModuleCost(flops, held, held + _backward(config, shape, shape.source_time, trained_bias, later))


def decoder_layer_cost(config: T5Config, shape: MicroBatchShape, trained_bias: bool = True) -> ModuleCost:
    """One layer of the decoder: causal self-attention, cross-attention to M source tokens, feed-forward.

    Keys and values of cross-attention are made of the sources in every layer; their operations are among these.

    Args:
        config: the model.
        shape: of a micro-batch.
        trained_bias: the decoder's relative bias is.
    """
    tokens, sources, size = shape.tokens, shape.source_tokens, config.hidden_size
    width, half = config.num_heads * config.head_dim, shape.compute_bytes
    flops = _attention_flops(config, tokens, tokens * shape.time / 2) + _feed_forward_flops(config, tokens)
    flops += 2 * size * width * (2 * tokens + 2 * sources) + 4 * tokens * shape.source_time * width
    # Cross-attention: queries and what they are made of, keys and values, output, log-sum-exp, the mask as numbers.
    later = tokens * (norm_bytes(size) + inputs_bytes(size, 1, shape) + half * 2 * width + FP32 * config.num_heads)
    later += sources * half * 2 * width + half * tokens * shape.source_time
    later += _feed_forward(config, shape, tokens)
    held = _self_attention(config, shape, shape.time, trained_bias) + later
    return ModuleCost(flops, held, held + _backward(config, shape, shape.time, trained_bias, later))


def encoder_shared_bytes(config: T5Config, shape: MicroBatchShape, trained_bias: bool, checkpointed: bool) -> float:
    """What the encoder's layers on a stage share: biases [B, H, M, M], who sees whom, and classes of distances.

    Attention whose scores want a gradient does not keep the biases that it has added to them.
    """
    pairs = shape.source_time**2
    biases = 0.0 if trained_bias and not checkpointed else scores_bytes(config, shape, shape.source_time)
    return biases + (shape.rows + INDEX) * pairs * trained_bias


def decoder_shared_bytes(config: T5Config, shape: MicroBatchShape, trained_bias: bool, checkpointed: bool) -> float:
    """What the decoder's layers on a stage share: the same for targets, and sources as products read them.

    The biases stay, being cut off what they are made of; see `StageOutput.carried`.
    """
    masks = scores_bytes(config, shape, shape.time) + (shape.rows + INDEX) * shape.time**2 * trained_bias
    masks += shape.tokens * shape.source_time * checkpointed  # who sees which source
    sources = shape.source_bytes(config.hidden_size)
    return masks + sources + (BF16 * sources / FP32 if shape.mixed else 0.0)


def scores_bytes(config: T5Config, shape: MicroBatchShape, time: int) -> float:
    """Of a number in fp32 for each head and pair of tokens: of biases, of their gradient, of probabilities."""
    return float(FP32 * shape.rows * config.num_heads * time**2)


def _attention_flops(config: T5Config, tokens: float, pairs: float) -> float:
    """Queries, keys, values and output of so many tokens, and both products over pairs of them."""
    width = config.num_heads * config.head_dim
    return 2 * tokens * 4 * config.hidden_size * width + 4 * pairs * width


def _feed_forward_flops(config: T5Config, tokens: float) -> float:
    matrices = 2 if config.feed_forward == "relu" else 3
    return 2 * tokens * matrices * config.hidden_size * config.intermediate_size


def _self_attention(config: T5Config, shape: MicroBatchShape, time: int, trained_bias: bool) -> float:
    """Bytes that self-attention of rows of `time` tokens keeps, its norm and input among them."""
    tokens, width, half = shape.rows * time, config.num_heads * config.head_dim, shape.compute_bytes
    held = float(tokens * (norm_bytes(config.hidden_size) + inputs_bytes(config.hidden_size, 3, shape) + half * width))
    scores = scores_bytes(config, shape, time)
    if trained_bias:
        return held + tokens * width * 3 * FP32 + scores
    mask = scores * half / FP32 if shape.mixed else 0.0  # converted in every layer
    return held + tokens * (half * 3 * width + FP32 * config.num_heads) + mask


def _feed_forward(config: T5Config, shape: MicroBatchShape, tokens: float) -> float:
    """Bytes that a feed-forward keeps: norm and input; ReLU's output, or gate, its GELU, up and their product."""
    size, half = config.hidden_size, shape.compute_bytes
    readers, kept = (1, 1) if config.feed_forward == "relu" else (2, 4)
    return tokens * (norm_bytes(size) + inputs_bytes(size, readers, shape) + half * kept * config.intermediate_size)


def _backward(config: T5Config, shape: MicroBatchShape, time: int, trained_bias: bool, later: float) -> float:
    """Bytes on top of what is held while a layer is back-propagated.

    Those are the gradients of its feed-forward, or, when `later` bytes that come after self-attention are gone, those
    of probabilities and scores.
    """
    tokens, size, half = shape.rows * time, config.hidden_size, shape.compute_bytes
    narrow = BF16 * size * tokens if shape.mixed else 0.0
    inner = half * config.intermediate_size * (tokens + max(tokens, size))
    scores = 2 * scores_bytes(config, shape, time) - later if trained_bias else 0.0
    return max(FP32 * size * tokens + narrow + inner, scores)
