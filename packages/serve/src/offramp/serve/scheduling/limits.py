"""Which requests can never run, however long they wait."""

from __future__ import annotations

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig
from offramp.serve.request.request import Request


def max_source_len(config: EngineConfig, max_model_len: int) -> int:
    """Most tokens of a source: it is read in one iteration, so they fit into its budget."""
    return min(max_model_len, config.max_tokens_per_iteration)


def check_limits(request: Request, config: EngineConfig, max_model_len: int, cache_tokens: int) -> None:
    """Raise `OfframpError` for a request that can never run.

    Args:
        request: not yet admitted.
        config: the engine's limits.
        max_model_len: most tokens of one request, prompt and completion together; and most tokens of a source.
        cache_tokens: tokens that the KV cache holds.
    """
    _check_source(request, config, max_model_len)
    _check_stages(request, config)
    sizes = (
        f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.sampling.max_tokens} make "
        f"{request.max_total_tokens} tokens"
    )
    if request.max_total_tokens > max_model_len:
        raise OfframpError(
            f"{sizes}, more than the {max_model_len} that the model takes; shorten the prompt or lower max_tokens."
        )
    num_source = request.num_source_tokens
    # Source and text lie in blocks of their own.
    if -(-num_source // config.block_size) * config.block_size + request.max_total_tokens > cache_tokens:
        beside = f" beside {num_source} of the source" if num_source else ""
        raise OfframpError(
            f"{sizes}{beside}, more than the {cache_tokens} that the KV cache holds; shorten the prompt, lower "
            "max_tokens or enlarge the cache."
        )
    if request.exits.kv_policy not in ("recompute", "verify"):
        return
    # One row is for others: a request that always takes the whole budget would shut them out.
    budget = config.max_tokens_per_iteration
    num_pending = min(request.exits.max_pending, request.sampling.max_tokens)
    if num_pending + 2 > budget:
        raise OfframpError(
            f"max_pending {request.exits.max_pending} lets {num_pending} tokens run again beside a new one, and "
            f"max_tokens_per_iteration {budget} leaves no row for other requests; lower the first or raise the second."
        )


def _check_stages(request: Request, config: EngineConfig) -> None:
    kv_policy = request.exits.kv_policy
    if config.pipeline_stages is None:
        if kv_policy == "pipeline":
            raise OfframpError(
                "KV policy 'pipeline' is one of an engine that runs in stages; set pipeline_stages (1 will do), or "
                "choose another policy."
            )
        return
    if kv_policy not in ("pipeline", "full"):
        raise OfframpError(
            f"KV policy {kv_policy!r} is not one of an engine that runs in stages; choose pipeline or full, or leave "
            "pipeline_stages out."
        )
    if request.sampling.prompt_logprobs is not None:
        raise OfframpError(
            "prompt_logprobs are not sent back by the stages of a pipeline; leave them out, or leave pipeline_stages "
            "out."
        )


def _check_source(request: Request, config: EngineConfig, max_model_len: int) -> None:
    num_source, limit = request.num_source_tokens, max_source_len(config, max_model_len)
    if num_source <= limit:
        return
    remedy = "shorten it"
    if limit < max_model_len:
        remedy += ", or raise max_tokens_per_iteration: a source is read in one iteration"
    raise OfframpError(f"a source of {num_source} tokens is more than the {limit} that are read; {remedy}.")
