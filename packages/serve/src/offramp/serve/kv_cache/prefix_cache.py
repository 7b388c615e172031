"""Full blocks of exact keys and values, found again by the tokens that they and everything before them hold.

A block's key is the node of the block before it and its own tokens. So the hash of a key chains over the whole prefix,
and a block is taken only if its tokens are equal and it was computed after an equal prefix: a hash that collides costs
time and never a wrong answer.

Nodes form a tree. Whoever refers to a block refers to the blocks before it too (see `insert`), and gives the last one
back first, so the pool loses a node's children before the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offramp.serve.kv_cache.block_pool import BlockPool

ROOT = 0
"""Serial number of the node before every first block."""


@dataclass(frozen=True)
class PrefixNode:
    """One block that can be found.

    Attributes:
        serial: never used twice, unlike block ids; what the keys of the blocks after it refer to.
        block_id: where its keys and values are.
        parent: serial number of the node before it.
        tokens: the tokens it holds.
    """

    serial: int
    block_id: int
    parent: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Finds blocks by what they hold. The pool owns them and says when one is lost."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Start empty.

        Args:
            pool: whose `on_evict` this takes.
            block_size: tokens per block.
        """
        self._pool = pool
        self._block_size = block_size
        self._nodes: dict[tuple[int, tuple[int, ...]], PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}
        self._last_serial = ROOT
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, tokens: Callable[[int, int], list[int]], num_tokens: int) -> list[PrefixNode]:
        """The longest chain of blocks that hold the beginning of a sequence.

        Args:
            tokens: token ids at positions [start, stop) of the sequence.
            num_tokens: how many it has; only whole blocks of them are looked for.
        """
        found: list[PrefixNode] = []
        parent = ROOT
        for start in range(0, num_tokens - self._block_size + 1, self._block_size):
            node = self._nodes.get((parent, tuple(tokens(start, start + self._block_size))))
            if node is None:
                break
            found.append(node)
            parent = node.serial
        return found

    def insert(self, parent: int, tokens: tuple[int, ...], block_id: int) -> PrefixNode:
        """Make a full block of exact keys and values known.

        Args:
            parent: serial number of the node of the block before it, which the owner of `block_id` refers to.
            tokens: what it holds.
            block_id: a live block.

        Returns:
            The node of the block that holds this from now on. It is another block's if somebody was first: then the
            caller should refer to that one instead, so that equal content is held once, and so that a chain is made of
            blocks that all its owners refer to.
        """
        assert len(tokens) == self._block_size, tokens
        known = self._nodes.get((parent, tokens))
        if known is not None:
            return known
        self._last_serial += 1
        node = PrefixNode(self._last_serial, block_id, parent, tokens)
        self._nodes[parent, tokens] = self._by_block[block_id] = node
        self._pool.keep(block_id)
        return node

    def withdraw(self, block_id: int) -> None:
        """Let nobody find a block any more, nor those that follow it, because it may be wrong or will be overwritten.

        Who refers to it already is not touched. Blocks that follow it stay until the pool loses them.
        """
        if block_id in self._by_block:
            self._forget(block_id)
            self._pool.discard(block_id)

    def _forget(self, block_id: int) -> None:
        node = self._by_block.pop(block_id)
        del self._nodes[node.parent, node.tokens]
