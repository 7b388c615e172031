from __future__ import annotations

import math

import pytest
import torch

from helpers.tiny import VOCAB_SIZE, tiny_model
from offramp.common.checkpoint import Checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig, Kernels
from offramp.serve.engine import Engine
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.unembedding import Unembedding
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

SHORTLIST = (7, 3, 120, 299, 64, 65, 200, 11)


@pytest.mark.parametrize("kernels", ["auto", "packed", "plain"])
def test_a_shortlist_head_says_what_the_whole_one_would_say_of_these_tokens(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(VOCAB_SIZE, 32, generator=generator), torch.randn(5, 32, generator=generator)
    tokens = torch.tensor(SHORTLIST)
    head = Unembedding(PackedLinear(weight[tokens], kernels=kernels), tokens, VOCAB_SIZE)
    expected = torch.full((5, VOCAB_SIZE), -math.inf)
    expected[:, list(SHORTLIST)] = x @ weight[list(SHORTLIST)].T
    torch.testing.assert_close(head.logits(x), expected)
    best = head.head(x)
    assert best.token_ids.tolist() == expected.argmax(dim=-1).tolist()
    torch.testing.assert_close(best.best, expected.max(dim=-1).values)
    torch.testing.assert_close(best.logsumexp, expected.logsumexp(dim=-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_full_depth_with_a_shortlist_head_is_full_depth_among_its_tokens(temperature: float) -> None:
    policy = ExitPolicy("margin", {2: 0.3}, shortlist=SHORTLIST)
    checkpoint = Checkpoint(tiny_model(ExitConfig((2,), "norm")), {}, policy)
    # Nothing else has a chance: the same as a head without them.
    others = tuple((token, -100.0) for token in range(VOCAB_SIZE) if token not in SHORTLIST)

    def texts(engine: Engine, bias: tuple[tuple[int, float], ...]) -> list[list[int]]:
        requests = [
            Request(
                str(index),
                (5 + index, 9),
                SamplingParams(max_tokens=12, temperature=temperature, seed=index, logit_bias=bias),
                ExitOptions("full"),
            )
            for index in range(3)
        ]
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished:
            engine.step()
        return [request.output_token_ids for request in requests]

    config = EngineConfig(num_blocks=16)
    narrow = texts(Engine(checkpoint, config, shortlist_head=True), ())
    assert narrow == texts(Engine(checkpoint, config), others)
    assert {token for text in narrow for token in text} <= set(SHORTLIST)
    assert len({tuple(text) for text in narrow}) > 1
    with pytest.raises(OfframpError, match="no shortlist"):
        Engine(Checkpoint(tiny_model(ExitConfig((2,), "norm")), {}), config, shortlist_head=True)
