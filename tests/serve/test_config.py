from __future__ import annotations

import pytest

from offramp.common.errors import OfframpError
from offramp.serve.config import DEFAULT_KV_CACHE_BYTES, EngineConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"max_num_seqs": True}, "max_num_seqs True"),
        ({"max_waiting": 1.5}, "max_waiting 1.5"),
        ({"num_blocks": -1}, "num_blocks -1"),
        ({"num_threads": 100_000}, "num_threads 100000 must be in 1..1024"),
        ({"max_parked_iterations": 0}, "max_parked_iterations 0 must be in 1..256"),
        ({"max_parked_iterations": 10**6}, "max_parked_iterations 1000000 must be in 1..256"),
        ({"num_blocks": 8, "kv_cache_bytes": 4096}, "give one of them"),
        ({"max_num_seqs": 8, "max_tokens_per_iteration": 7}, "7 is below max_num_seqs 8"),
        ({"sync_policy": "some"}, "all, quantile, regroup"),
        ({"split_rule": "never"}, "always, cost"),
        ({"kernels": "cuda"}, "auto, native, packed, plain"),
        ({"quantile": 0}, "quantile 0 must be"),
        ({"quantile": 1.5}, "quantile 1.5 must be"),
        ({"prefix_caching": "no"}, "prefix_caching 'no' must be true or false"),
        ({"dtype": "fp16"}, "fp32, bf16"),
        ({"quantization": "int4"}, "none, int8"),
    ],
)
def test_refuses_with_the_value_and_the_remedy(settings: dict[str, object], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        EngineConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_cache_blocks() -> None:
    assert EngineConfig(num_blocks=7).cache_blocks(block_bytes=10**12) == 7
    assert EngineConfig(kv_cache_bytes=4097).cache_blocks(block_bytes=1024) == 4
    assert EngineConfig().cache_blocks(block_bytes=1 << 20) == DEFAULT_KV_CACHE_BYTES >> 20
    with pytest.raises(OfframpError, match=r"1023 holds no block.*1024 bytes"):
        EngineConfig(kv_cache_bytes=1023).cache_blocks(block_bytes=1024)
