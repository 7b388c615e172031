"""The engine's settings as command-line options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args

from offramp.serve.config import Dtype, EngineConfig, Kernels, Quantization, SplitRule, SyncPolicy


def add_engine_options(parser: argparse.ArgumentParser, *, queue: bool = True) -> None:
    """Adds one option for each setting; what is not given keeps the engine's default.

    Args:
        parser: gets them as a group of their own.
        queue: whether requests may have to wait, or be refused; not where all of them are known before.
    """
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=get_args(Dtype), help="of weights, states and KV cache (default: fp32)")
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="round weights as they are loaded: half as much is read for each token (default: none)",
    )
    group.add_argument(
        "--kernels", choices=get_args(Kernels), help="what computes the layers (default: auto, the fastest that works)"
    )
    group.add_argument(
        "--device",
        metavar="NAME",
        help="what computes: cpu, cuda, cuda:N, or auto, which is a CUDA device if there is one (default: cpu)",
    )
    group.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="on CUDA, decode by captured graphs (default: yes)",
    )
    group.add_argument(
        "--sync-policy",
        choices=get_args(SyncPolicy),
        help="tokens of a batch leave: all together; together once a quantile is sure; each on its own "
        "(default: regroup)",
    )
    group.add_argument(
        "--quantile", type=float, metavar="Q", help="share that must be sure for --sync-policy quantile (default: 0.75)"
    )
    group.add_argument(
        "--split-rule",
        choices=get_args(SplitRule),
        help="regroup lets sure tokens go always, or only where that saves time as measured (default: always)",
    )
    group.add_argument(
        "--deep-quorum",
        type=float,
        metavar="Q",
        help="rows that stay at an exit wait there until this share of the batch wants the layers above (default: 0, "
        "nobody waits)",
    )
    group.add_argument(
        "--max-parked-iterations",
        type=int,
        metavar="N",
        help="most iterations that such a row waits, up to 256 (default: 8)",
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share exact keys and values of equal beginnings (default: yes)",
    )
    group.add_argument(
        "--group-by-depth",
        action=argparse.BooleanOptionalAction,
        help="run sequences of similar expected depth together (default: no)",
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests in one iteration (default: 32)")
    group.add_argument(
        "--max-tokens-per-iteration", type=int, metavar="N", help="most tokens in one iteration (default: 512)"
    )
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="most tokens of prompt and completion")
    group.add_argument(
        "--kv-cache-bytes",
        type=int,
        metavar="BYTES",
        help="memory for keys and values (default: 1 GiB, or less where --max-num-seqs at full length need less)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="tokens per block of the cache (default: 16; FlashAttention on CUDA takes multiples of 256)",
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of the engine")
    group.add_argument(
        "--pipeline-stages",
        type=int,
        metavar="N",
        help="run the layers in N stages, each in a process of its own; tokens leave by the KV policy pipeline",
    )
    if queue:
        group.add_argument("--max-waiting", type=int, metavar="N", help="most requests that wait; more get 429")


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The `EngineConfig` fields that were given."""
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(EngineConfig)}
    settings = {name: value for name, value in given.items() if value is not None}
    seats = settings.get("max_num_seqs", 0)
    if seats > EngineConfig.max_tokens_per_iteration:
        # Every seat must be able to advance in every iteration.
        settings.setdefault("max_tokens_per_iteration", seats)
    return settings
