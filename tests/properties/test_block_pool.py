from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offramp.serve.kv_cache.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners take, share, keep and give back blocks in any order, beside a model that only counts."""

    @initialize(num_blocks=st.integers(1, 16))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.on_evict = lambda block: self.evicted.append(block)
        self.evicted: list[int] = []
        self.owners: list[tuple[int, ...]] = []
        self.kept: set[int] = set()
        self.cached: list[int] = []  # given back longest ago first

    def live(self) -> set[int]:
        return {block for owner in self.owners for block in owner}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_available))
        lost = max(0, count - self.pool.num_free)
        live = self.live()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not live.intersection(blocks), "handed out twice"
        assert self.evicted == self.cached[:lost], "not the one given back longest ago"
        assert set(blocks).isdisjoint(self.cached[lost:]), "a cached block was lost while others were to be had"
        self.kept.difference_update(self.evicted)
        self.cached, self.evicted = self.cached[lost:], []
        self.owners.append(blocks)

    @precondition(lambda self: self.owners or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = (
            data.draw(st.lists(st.sampled_from([*sorted(self.live()), *self.cached]), unique=True))
            if (self.live() or self.cached)
            else []
        )
        self.pool.share(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.append(tuple(blocks))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.live())))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.discard(block)
        self.kept.remove(block)
        self.cached = [other for other in self.cached if other != block]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(blocks)
        live = self.live()
        self.cached += [block for block in blocks if block in self.kept and block not in live]

    @invariant()
    def every_block_is_counted_once(self) -> None:
        if not hasattr(self, "pool"):
            return
        live = self.live()
        assert self.pool.num_live == len(live)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == self.pool.num_blocks - len(live) - len(self.cached)
        for block in range(self.pool.num_blocks):
            references = sum(block in owner for owner in self.owners)
            assert self.pool.is_live(block) == (references > 0)
            assert self.pool.is_private(block) == (references == 1 and block not in self.kept)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owners:
                self.pool.release(owner)
            assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
