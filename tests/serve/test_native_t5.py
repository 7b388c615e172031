"""T5's decoder layers in C++: what torch computes, and for each row the same bits whatever is beside it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import drain, make_engine, random_jobs
from helpers.tiny_t5 import SHAPES, hugging_face_t5, load_t5
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.importing import NewExits, import_model
from offramp.common.t5.model import MultiExitT5
from offramp.serve.model.layers_t5_native import NativeT5Layers
from offramp.serve.model.native import native_library
from offramp.serve.request.request import Request

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is nothing to build native kernels with")


@functools.cache
def model(shape: str) -> MultiExitT5:
    with tempfile.TemporaryDirectory() as folder:
        hugging_face_t5(Path(folder) / "hf", **SHAPES[shape])
        import_model(str(Path(folder) / "hf"), Path(folder) / "out", exits=NewExits(ExitConfig((1, 3), "final")))
        return load_t5(Path(folder) / "out").model


def said(shape: str, batched: bool, **config: Any) -> list[tuple[list[int], list[int], list[float | None]]]:
    """Tokens, exit layers and confidences of some requests, all at once or one after the other."""
    engine = make_engine(model(shape), **config)
    requests: list[Request] = []
    for index, job in enumerate(random_jobs([ExitPolicy("margin", {1: 0.2, 3: 0.2}), None] * 3)):
        requests.append(job.request(str(index), engine.decoder_start_token_id))
        engine.add_request(requests[-1])
        if not batched:
            drain(engine)
    drain(engine)
    assert all(request.error is None for request in requests)
    return [(request.output_token_ids, request.exit_layers, request.confidences) for request in requests]


@pytest.mark.parametrize("shape", ["t5, deep decoder", "v1.1", "flan, odd heads"])
def test_tokens_and_exits_are_those_of_torch(shape: str) -> None:
    ours, theirs = (said(shape, True, kernels=kernels) for kernels in ("native", "plain"))
    for one, other in zip(ours, theirs, strict=True):
        assert one[:2] == other[:2]
        assert [value or 0.0 for value in one[2]] == pytest.approx([value or 0.0 for value in other[2]], abs=1e-4)
    engine = make_engine(model(shape), kernels="native")
    assert isinstance(engine._model.layers, NativeT5Layers)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ["t5", "v1.1"])
def test_bits_do_not_depend_on_the_batch(shape: str, dtype: str) -> None:
    alone = said(shape, False, kernels="native", dtype=dtype)
    assert said(shape, True, kernels="native", dtype=dtype) == alone
    assert said(shape, True, kernels="native", dtype=dtype, max_num_seqs=3, max_tokens_per_iteration=33) == alone
