from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offramp.serve.kv_cache.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners take and give back blocks in any order; nobody ever shares one and none is lost."""

    @initialize(num_blocks=st.integers(1, 20))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.owned: list[tuple[int, ...]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @invariant()
    def no_leak_and_no_double_use(self) -> None:
        if not hasattr(self, "pool"):
            return
        blocks = [block for owner in self.owned for block in owner]
        assert len(set(blocks)) == len(blocks) == self.pool.num_live
        assert set(blocks) <= set(range(self.pool.num_blocks))
        assert self.pool.num_live + self.pool.num_free == self.pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owned:
                self.pool.release(owner)
            assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
