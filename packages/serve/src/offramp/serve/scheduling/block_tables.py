"""The block tables of sequences: what they take over from the prefix cache, what they get, and what others may use.

**Exactness.** Blocks enter the prefix cache when they are full of tokens with exact keys and values
(`Request.num_exact_tokens`), and requests of any policy start with what it holds of their prompts, but for the last
token of the prompt, whose logits are needed. A request that is run again takes from it no more than was exact before.
Whoever would write into a block that others can see writes into a copy.

**Sources.** The keys and values of cross-attention lie in blocks of the same pool. They belong to one request from its
start to its end, and none of its blocks is shared: what a decoder makes of a text depends on the source too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.prefix_cache import ROOT, PrefixCache, PrefixNode
from offramp.serve.scheduling.sequence import SequenceState


class BlockTables:
    """Gives sequences their blocks and takes them back."""

    def __init__(self, pool: BlockPool, block_size: int, prefix_caching: bool) -> None:
        """Start with no sequence.

        Args:
            pool: free blocks, this object's alone.
            block_size: tokens per block.
            prefix_caching: whether sequences share the exact keys and values of equal beginnings.
        """
        self._pool = pool
        self._size = block_size
        self._prefix = PrefixCache(pool, block_size) if prefix_caching else None

    @property
    def num_available(self) -> int:
        """Blocks that can be given away."""
        return self._pool.num_available

    def prefix_hits(self, sequence: SequenceState) -> list[PrefixNode]:
        """Known blocks that a sequence may start with; the last one may reach beyond what it may take over."""
        request = sequence.request
        asked = request.sampling.prompt_logprobs is not None
        if (
            self._prefix is None
            or request.source_token_ids
            or (asked and len(request.prompt_logprobs) < request.num_prompt_tokens - 1)
        ):
            return []
        limit = sequence.exact_limit
        # The block that the limit lies in counts if all of it is known and matches.
        num_tokens = min(request.num_tokens, -(-limit // self._size) * self._size)
        hits = self._prefix.match(request.tokens, num_tokens)
        if len(hits) == self._pool.num_blocks and len(hits) * self._size > limit:
            hits.pop()  # the last one could only be written in a copy, for which there would be no block
        return hits

    def is_next_under_way(
        self, sequence: SequenceState, hits: Sequence[PrefixNode], running: Iterable[SequenceState]
    ) -> bool:
        """Whether a running sequence is computing the very block that a waiting one lacks after its `hits`."""
        request = sequence.request
        if self._prefix is None or request.source_token_ids or request.sampling.prompt_logprobs is not None:
            return False
        start, stop = len(hits) * self._size, (len(hits) + 1) * self._size
        if stop > sequence.exact_limit:
            return False
        chain = hits[-1].serial if hits else ROOT
        wanted = request.tokens(start, stop)
        return any(
            other.chain == chain
            and other.num_known == len(hits)
            and not other.decodes
            and stop <= other.request.num_prompt_tokens
            and other.request.tokens(start, stop) == wanted
            for other in running
        )

    def num_to_start(self, sequence: SequenceState, hits: Sequence[PrefixNode]) -> int:
        """Available blocks that a waiting sequence takes if it starts with `hits` and computes all tokens it has."""
        wanted = self._blocks_for(sequence.request.num_tokens) + self._blocks_for(sequence.request.num_source_tokens)
        wanted -= sum(self._pool.is_live(hit.block_id) for hit in hits)
        return wanted + (len(hits) * self._size > sequence.exact_limit)  # a copy

    def num_to_go_on(self, sequence: SequenceState) -> int:
        """Blocks that a running sequence lacks for all tokens it has."""
        return max(0, self._blocks_for(sequence.request.num_tokens) - len(sequence.blocks))

    def start(self, sequence: SequenceState, hits: Sequence[PrefixNode]) -> None:
        """Give a sequence without blocks what the prefix cache holds of its tokens, and blocks for its source."""
        num_tokens = min(len(hits) * self._size, sequence.exact_limit)
        num_known = num_tokens // self._size
        self._pool.share([hit.block_id for hit in hits])
        sequence.blocks = [hit.block_id for hit in hits]
        sequence.source_blocks = self._pool.allocate(self._blocks_for(sequence.request.num_source_tokens))
        sequence.num_known = num_known
        sequence.chain = hits[num_known - 1].serial if num_known else ROOT
        sequence.request.num_computed_tokens = sequence.request.num_exact_tokens = num_tokens

    def has_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Whether a sequence's next tokens fit into blocks that it has and that it may write."""
        stop = sequence.request.num_computed_tokens + num_tokens
        return stop <= len(sequence.blocks) * self._size and not self._needs_copy(sequence)

    def num_fitting(self, sequence: SequenceState, num_tokens: int) -> int:
        """For how many of a sequence's next tokens there are blocks: `num_tokens` or fewer."""
        start = sequence.request.num_computed_tokens
        available = self._pool.num_available - self._needs_copy(sequence)
        if available < 0:
            return 0
        return min(num_tokens, max(0, (len(sequence.blocks) + available) * self._size - start))

    def extend(self, sequence: SequenceState, num_tokens: int) -> tuple[int, int] | None:
        """Give a sequence blocks for its next tokens, as many as `num_fitting` allows.

        Returns:
            The block to copy and the block to copy it to, if it begins to write in one that others can see.
        """
        start = sequence.request.num_computed_tokens
        copy = None
        if self._needs_copy(sequence):
            (target,) = self._pool.allocate(1)
            shared = sequence.blocks[start // self._size]
            self._pool.release([shared])
            sequence.blocks[start // self._size] = target
            copy = (shared, target)
        num_missing = self._blocks_for(start + num_tokens) - len(sequence.blocks)
        if num_missing > 0:
            sequence.blocks += self._pool.allocate(num_missing)
        return copy

    def share_exact(self, sequence: SequenceState) -> None:
        """See how much of a sequence is exact, and let others find the blocks that are full of it."""
        request = sequence.request
        exact = request.num_computed_tokens - sequence.num_incomplete
        if sequence.early_from is not None:
            exact = min(exact, sequence.early_from)
        request.num_exact_tokens = exact
        if self._prefix is None or request.source_token_ids:
            return
        while (sequence.num_known + 1) * self._size <= exact:
            index = sequence.num_known
            tokens = tuple(request.tokens(index * self._size, (index + 1) * self._size))
            node = self._prefix.insert(sequence.chain, tokens, sequence.blocks[index])
            if node.block_id != sequence.blocks[index]:
                self._pool.share([node.block_id])
                self._pool.release([sequence.blocks[index]])
                sequence.blocks[index] = node.block_id
            sequence.chain = node.serial
            sequence.num_known += 1

    def withdraw(self, sequence: SequenceState) -> None:
        """Let nobody take over what a sequence has computed or taken over itself: it may be wrong."""
        if self._prefix is not None:
            for block_id in sequence.blocks[: sequence.num_known + 1]:
                self._prefix.withdraw(block_id)

    def release(self, sequence: SequenceState) -> None:
        """Take all blocks of a sequence back.

        Safe even while an iteration that writes them is running: they are handed out again only by a later one.
        """
        # Backwards: of a chain of known blocks, the end must be lost before the beginning.
        self._pool.release(sequence.blocks[::-1])
        self._pool.release(sequence.source_blocks)
        sequence.blocks, sequence.num_known, sequence.chain = [], 0, ROOT
        sequence.source_blocks, sequence.is_encoded = (), False

    def _needs_copy(self, sequence: SequenceState) -> bool:
        """Whether the next token lies in a block that others can see."""
        index = sequence.request.num_computed_tokens // self._size
        return index < len(sequence.blocks) and not self._pool.is_private(sequence.blocks[index])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)
