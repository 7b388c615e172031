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


def test_live_cached_and_free_blocks_are_counted_apart() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.share([first])
    pool.release([first, second])
    assert (pool.num_live, pool.num_cached, pool.num_free) == (1, 0, 3)
    pool.release([first])
    assert (pool.num_live, pool.num_cached, pool.num_free, pool.num_available) == (0, 1, 3, 4)


def test_free_blocks_go_before_cached_ones_and_the_oldest_of_these_first() -> None:
    pool = BlockPool(3)
    lost: list[int] = []
    pool.on_evict = lost.append
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.keep(second)
    pool.release([second, first])
    assert set(pool.allocate(1)).isdisjoint([first, second])
    assert lost == []
    assert pool.allocate(2) == (second, first)
    assert lost == [second, first]
    assert pool.is_private(first), "it is kept no more"


def test_only_what_holds_something_can_be_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.share([0])
    with pytest.raises(AssertionError, match="not live"):
        pool.keep(0)
