from __future__ import annotations

import pytest
import torch

from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL, TokenBatch
from offramp.train.fill_aware import check_probabilities, draw_exit_depths

LAYERS = 8


def rows(count: int, time: int = 50) -> TokenBatch:
    ids = torch.randint(0, 1000, (count, time), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, ids.roll(-1, 1), torch.zeros_like(ids))


def draw(batch: TokenBatch, step: int = 0) -> torch.Tensor:
    return draw_exit_depths(batch, {2: 0.2, 5: 0.3}, LAYERS, seed=7, step=step)


def test_shares_are_the_probabilities() -> None:
    depths = draw(rows(400))[:, 1:]
    for layer, share in ((2, 0.2), (5, 0.3), (LAYERS, 0.5)):
        assert float((depths == layer).float().mean()) == pytest.approx(share, abs=0.02)


def test_a_draw_depends_on_the_row_and_the_step_alone() -> None:
    batch = rows(6)
    whole = draw(batch)
    parts = torch.cat([draw(batch.rows(start, start + 2)) for start in (0, 2, 4)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, draw(batch, step=1))
    assert not torch.equal(whole[0], whole[1])


def test_only_generated_tokens_are_frozen() -> None:
    batch = rows(200)
    batch.labels[:, :10] = IGNORED_LABEL  # a prompt of 11 tokens: the last one predicts a target, and never exits
    batch.segment_ids[:, 30:] = 1  # another example; its first token was not generated
    depths = draw(batch)
    assert (depths[:, :11] == LAYERS).all()
    assert (depths[:, 30] == LAYERS).all()
    assert (depths[:, 11:30] < LAYERS).any()


def test_probabilities_are_checked() -> None:
    check_probabilities({}, ())
    check_probabilities({2: 0.5, 5: 0.5}, (2, 5))
    with pytest.raises(OfframpError, match=r"names layers \[3\]"):
        check_probabilities({3: 0.1}, (2, 5))
    with pytest.raises(OfframpError, match="at most 1"):
        check_probabilities({2: 0.6, 5: 0.6}, (2, 5))
