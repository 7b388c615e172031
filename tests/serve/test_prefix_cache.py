from __future__ import annotations

from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.prefix_cache import ROOT, PrefixCache


def find(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return [node.block_id for node in cache.match(lambda start, stop: tokens[start:stop], len(tokens))]


def fill(cache: PrefixCache, pool: BlockPool, tokens: list[int], size: int) -> list[int]:
    """Blocks for new tokens, known to the cache, and still owned."""
    blocks = list(pool.allocate(len(tokens) // size))
    chain = ROOT
    for index, block in enumerate(blocks):
        node = cache.insert(chain, tuple(tokens[index * size : (index + 1) * size]), block)
        assert node.block_id == block
        chain = node.serial
    return blocks


def test_the_longest_known_beginning_is_found_in_whole_blocks() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    first, second = fill(cache, pool, [1, 2, 3, 4], 2)
    assert find(cache, [1, 2, 3, 4, 5]) == [first, second]
    assert find(cache, [1, 2, 3]) == [first]
    assert find(cache, [1, 2, 3, 5]) == [first]
    assert find(cache, [3, 4]) == []
    assert find(cache, [1]) == []


def test_equal_tokens_after_another_beginning_are_another_block() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    _, after_one = fill(cache, pool, [1, 1, 5, 5], 2)
    _, after_two = fill(cache, pool, [2, 2, 5, 5], 2)
    assert find(cache, [1, 1, 5, 5])[1] == after_one
    assert find(cache, [2, 2, 5, 5])[1] == after_two


def test_tokens_with_equal_hashes_are_told_apart() -> None:
    assert hash((-1, -1)) == hash((-2, -2))  # CPython: no real token ids, but as real a collision
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    fill(cache, pool, [-1, -1], 2)
    assert find(cache, [-2, -2]) == []


def test_who_comes_second_is_told_of_the_first() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    (first,) = fill(cache, pool, [1, 2], 2)
    (second,) = pool.allocate(1)
    assert cache.insert(ROOT, (1, 2), second).block_id == first
    assert pool.is_private(second)
    assert not pool.is_private(first)


def test_blocks_outlive_their_owner_until_the_room_is_needed_last_block_first() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, 1)
    blocks = fill(cache, pool, [1, 2, 3], 1)
    pool.release(blocks[::-1])
    assert (pool.num_live, pool.num_cached, pool.num_free) == (0, 3, 0)
    assert find(cache, [1, 2, 3]) == blocks
    assert pool.allocate(1) == (blocks[2],)
    assert find(cache, [1, 2, 3]) == blocks[:2]
    assert len(cache) == 2


def test_a_withdrawn_block_and_those_after_it_are_not_found() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 1)
    blocks = fill(cache, pool, [1, 2, 3], 1)
    cache.withdraw(blocks[1])
    cache.withdraw(blocks[1])
    assert find(cache, [1, 2, 3]) == blocks[:1]
    pool.release(blocks[::-1])
    # The same tokens computed again do not bring back what followed the wrong ones.
    again = pool.allocate(1)
    first = cache.match(lambda start, stop: [1, 2, 3][start:stop], 1)[0]
    cache.insert(first.serial, (2,), again[0])
    assert find(cache, [1, 2, 3]) == [blocks[0], again[0]]
