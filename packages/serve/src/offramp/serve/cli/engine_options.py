"""The engine's settings as command-line options, for the commands that write them into a model folder."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from offramp.serve.config import Dtype, SyncPolicy

_NAMES = ("dtype", "sync_policy", "max_num_seqs", "max_waiting", "max_model_len", "kv_cache_bytes", "num_threads")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each setting; what is not given keeps the engine's default."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=get_args(Dtype), help="of weights, states and KV cache")
    group.add_argument("--sync-policy", choices=get_args(SyncPolicy), help="rows leave together, or each on its own")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests in one iteration")
    group.add_argument("--max-waiting", type=int, metavar="N", help="most requests that wait; more get 429")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="most tokens of prompt and completion")
    group.add_argument("--kv-cache-bytes", type=int, metavar="BYTES", help="memory for keys and values")
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of the engine")


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The `EngineConfig` fields that were given."""
    return {name: getattr(options, name) for name in _NAMES if getattr(options, name) is not None}
