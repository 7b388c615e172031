"""Which blocks of the KV cache are free. Counts ids only; the tensors are in `kv_cache.storage`."""

from __future__ import annotations

from collections.abc import Collection


class BlockPool:
    """Block ids 0 .. num_blocks - 1, each either free or live (owned by one request).

    Attributes:
        num_blocks: all blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        # A stack: the block freed last is handed out first, because its memory is the likeliest to be in a CPU cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._live: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Blocks that are owned; 0 when no request is running."""
        return len(self._live)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` different free blocks; their content is whatever their last owner left.

        The caller has checked `num_free`: running out is a fault of the scheduler, not of the user.
        """
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = tuple(self._free.pop() for _ in range(count))
        self._live.update(taken)
        return taken

    def free(self, block_ids: Collection[int]) -> None:
        """Give live blocks back, all or (on a fault of the caller) none."""
        assert len(set(block_ids)) == len(block_ids), f"blocks freed twice in one call: {block_ids}"
        assert self._live.issuperset(block_ids), f"not live: {sorted(set(block_ids) - self._live)}"
        self._live.difference_update(block_ids)
        self._free.extend(block_ids)
