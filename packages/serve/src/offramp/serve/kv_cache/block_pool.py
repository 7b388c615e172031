"""Which blocks of the KV cache are in use, and by how many. Counts ids only; the tensors are in `kv_cache.storage`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Block ids 0 .. num_blocks - 1, each of them in one of three states.

    - live: some request refers to it, perhaps several;
    - cached: nobody refers to it, but what it holds may be wanted again. It is reused before it is lost, and lost, the
      one given back longest ago first, before an allocation fails;
    - free: nobody refers to it and nobody will want what it holds.

    Attributes:
        num_blocks: all blocks.
        on_evict: told the id of a cached block that is about to be handed out for something else.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        # A stack: the block freed last is handed out first, because its memory is the likeliest to be in a CPU cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._kept: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to and that hold something of use."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that somebody refers to; 0 when no request is running."""
        return self.num_blocks - self.num_available

    def is_live(self, block_id: int) -> bool:
        """Whether anybody refers to a block."""
        return self._references[block_id] > 0

    def is_private(self, block_id: int) -> bool:
        """Whether a live block may be written: one refers to it, and its content is not kept for others."""
        return self._references[block_id] == 1 and block_id not in self._kept

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` different blocks, each with one reference; their content is whatever was left in them.

        The caller has checked `num_available`: running out is a fault of the scheduler, not of the user.
        """
        assert 0 <= count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        taken = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of some live or cached blocks."""
        for block_id in block_ids:
            assert self._references[block_id] or block_id in self._cached, f"block {block_id} holds nothing to share"
            self._cached.pop(block_id, None)
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take a reference away from each of some blocks, all or (on a fault of the caller) none.

        Of kept blocks without any more, the first one given is the first to be lost.
        """
        assert len(set(block_ids)) == len(block_ids), f"blocks released twice in one call: {block_ids}"
        idle = [block_id for block_id in block_ids if not self._references[block_id]]
        assert not idle, f"not live: {idle}"
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Say that the content of a live block will be of use when nobody refers to it any more."""
        assert self._references[block_id], f"block {block_id} is not live"
        self._kept.add(block_id)

    def discard(self, block_id: int) -> None:
        """Take `keep` back; a cached block becomes free."""
        self._kept.remove(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._kept.remove(block_id)
        if self.on_evict is not None:
            self.on_evict(block_id)
        return block_id
