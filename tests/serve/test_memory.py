from __future__ import annotations

import pytest
import torch

from offramp.common.errors import OfframpError
from offramp.serve import memory
from offramp.serve.kv_cache.storage import KVStorage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (3, 300, 300), (3, 700, 1024)])
def test_a_moved_tensor_is_the_same_tensor_elsewhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    moved = memory.moved(tensor)
    assert moved.dtype == dtype
    assert moved.is_contiguous()
    assert moved.data_ptr() != tensor.data_ptr()
    assert torch.equal(moved, tensor)


@pytest.mark.parametrize("size", [2 << 20, 100_000])
def test_large_tensors_begin_at_a_huge_page_and_outlive_their_neighbours(size: int) -> None:
    tensors = [memory.empty((size,), torch.float32).fill_(value) for value in range(3)]
    assert all(tensor.data_ptr() % (2 << 20) == 0 for tensor in tensors)
    del tensors[1]
    assert [float(tensor.sum()) for tensor in tensors] == [0.0, float(2 * size)]


@pytest.mark.parametrize("num_blocks", [1 << 40, 1 << 58])
def test_a_cache_that_no_memory_holds_is_refused_in_one_sentence(num_blocks: int) -> None:
    with pytest.raises(OfframpError, match=rf"no memory for a KV cache of {num_blocks * 8192} bytes; lower"):
        KVStorage(4, num_blocks, 16, 1, 16, torch.float32)
