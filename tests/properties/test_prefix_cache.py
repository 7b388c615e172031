from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.prefix_cache import ROOT, PrefixCache


class Owner:
    """A sequence with its blocks, of which the first `known` are in the cache."""

    def __init__(self, tokens: list[int], blocks: list[int], known: int, chain: int) -> None:
        self.tokens, self.blocks, self.known, self.chain = tokens, blocks, known, chain


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come with tokens of a small alphabet and leave; each block remembers the prefix it was computed for."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), withdraws=st.booleans())
    def start(self, num_blocks: int, block_size: int, withdraws: bool) -> None:
        self.size, self.withdraws = block_size, withdraws
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size)
        self.owners: list[Owner] = []
        self.content: dict[int, list[int]] = {}

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12))
    def begin(self, tokens: list[int]) -> None:
        hits = self.cache.match(lambda start, stop: tokens[start:stop], len(tokens))
        for index, hit in enumerate(hits):
            assert self.content[hit.block_id] == tokens[: (index + 1) * self.size], "a wrong block was found"
        if not self.withdraws:
            for owner in self.owners:
                shared = 0
                while (
                    shared < owner.known
                    and owner.tokens[: (shared + 1) * self.size] == tokens[: (shared + 1) * self.size]
                ):
                    shared += 1
                assert len(hits) >= shared, "a block in use was not found"
        blocks = [hit.block_id for hit in hits]
        missing = len(tokens) // self.size - len(hits)
        if missing > self.pool.num_available - sum(not self.pool.is_live(block) for block in blocks):
            return
        self.pool.share(blocks)
        new = self.pool.allocate(missing)
        for index, block in enumerate(new, start=len(hits)):
            self.content[block] = tokens[: (index + 1) * self.size]
        self.owners.append(Owner(tokens, [*blocks, *new], len(hits), hits[-1].serial if hits else ROOT))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def make_known(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        if owner.known == len(owner.blocks):
            return
        block = owner.blocks[owner.known]
        start = owner.known * self.size
        node = self.cache.insert(owner.chain, tuple(owner.tokens[start : start + self.size]), block)
        assert self.content[node.block_id] == owner.tokens[: start + self.size]
        if node.block_id != block:
            self.pool.share([node.block_id])
            self.pool.release([block])
            owner.blocks[owner.known] = node.block_id
        owner.known += 1
        owner.chain = node.serial

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), withdraw=st.integers(0, 3))
    def leave(self, data: st.DataObject, withdraw: int) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        if self.withdraws and withdraw == 0:
            for block in owner.blocks:
                self.cache.withdraw(block)
        self.pool.release(owner.blocks[::-1])

    @invariant()
    def what_is_known_can_be_found(self) -> None:
        """Where nothing is withdrawn, no block is kept that no sequence of tokens leads to."""
        if not hasattr(self, "pool") or self.withdraws:
            return
        live_known = {block for owner in self.owners for block in owner.blocks[: owner.known]}
        assert len(self.cache) == self.pool.num_cached + len(live_known)
        found = {
            node.block_id
            for content in self.content.values()
            for node in self.cache.match(lambda start, stop, tokens=content: tokens[start:stop], len(content))
        }
        assert len(found) == len(self.cache)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owners:
                self.pool.release(owner.blocks[::-1])
            assert self.pool.num_live == 0
            self.pool.allocate(self.pool.num_blocks)
            assert len(self.cache) == 0


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
