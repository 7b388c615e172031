from __future__ import annotations

import pytest

from offramp.serve.kv_cache.block_pool import BlockPool


def test_counts() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2]
    assert (pool.num_live, pool.num_free) == (3, 1)
    pool.release(blocks)
    assert (pool.num_live, pool.num_free) == (0, 4)


def test_misuse_is_noticed_and_changes_nothing() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="twice"):
        pool.release([first, first])
    with pytest.raises(AssertionError, match="not live"):
        pool.release([first, 2])
    assert (pool.num_live, pool.num_free) == (2, 1)
    pool.release([first, second])
    with pytest.raises(AssertionError, match="not live"):
        pool.release([first])
