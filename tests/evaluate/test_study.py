"""Studies of filled keys and values: what must be zero is zero, and what is measured is what the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import tiny_checkpoint, tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.block import Block
from offramp.evaluate import study
from offramp.evaluate.answering import Answer
from offramp.evaluate.cli.report import main as report
from offramp.evaluate.cli.study import main
from offramp.evaluate.results import read_results

POLICY = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    tiny_checkpoint(folder / "model", ExitConfig((1, 2, 3)), POLICY)
    rows = [f'{{"prompt": "{prompt}", "references": "x"}}' for prompt in ("Tiny models", "random weights", "wider")]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "text.txt").write_text("text")
    return folder


def run(folder: Path, name: str, out: Path, *more: str) -> dict[str, Any]:
    data = ["--task", "summarisation", "--data", str(folder / "rows.jsonl"), "--max-tokens", "20"]
    assert main([name, str(folder / "model"), *data, "--out", str(out), *more]) == 0
    return read_results(out, ["study"])


def series(results: dict[str, Any], curve: int) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in results["curves"][curve]["series"]}


def test_position(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(folder, "position", tmp_path / "a")
    right, same = series(results, 0), series(results, 2)
    assert right["exact"]["x"] == [1, 2, 4, 8, 16, 32]
    # The engine's answers at full depth are the plain forward's, token for token.
    assert set(right["exact"]["y"]) == set(same["exact"]["y"]) == {1.0}
    for kv_policy in ("recompute", "fill"):
        assert right[kv_policy]["y"][0] == 1
        assert min(right[kv_policy]["y"]) < 1
        assert min(same[kv_policy]["y"]) < min(right[kv_policy]["y"])  # a difference goes on and on
    assert "exact" in capsys.readouterr().out
    report([str(tmp_path / "a"), "-o", str(tmp_path / "report.html")])
    assert "Does quality fall" in (tmp_path / "report.html").read_text()


def test_exits_that_nobody_takes_change_nothing(folder: Path, tmp_path: Path) -> None:
    results = run(folder, "position", tmp_path / "a", "--threshold", "1")
    for curve in (0, 2):
        assert {value for one in series(results, curve).values() for value in one["y"]} == {1.0}


def test_kv_error(folder: Path, tmp_path: Path) -> None:
    results = run(folder, "kv-error", tmp_path / "a")
    for curve in (0, 1):
        after_1 = series(results, curve)["left after 1"]
        # The first layer above the first exit makes its keys from the very state that it would have had.
        assert after_1["x"] == [2, 3, 4]
        assert after_1["y"][0] == pytest.approx(0, abs=1e-6)
        assert after_1["y"][1] > 0.1
    attention = series(results, 2)["all tokens that reach the layer"]
    assert all(0 <= value <= 1 for value in attention["y"])
    by_age = series(results, 3)
    at = attention["x"].index(4)
    # Ages do not overlap and miss none.
    assert sum(by_age["layer 4"]["y"]) == pytest.approx(attention["y"][at], rel=1e-5)


def test_errors_are_those_of_the_states() -> None:
    model = tiny_model(ExitConfig((1, 2, 3)))
    prompt, said = [5, 6, 7], [40, 41, 42, 43]
    # The second token of the answer leaves after layer 1; all before it is exact.
    answer = Answer("", said, [4, 4, 1, 4], [None] * 4, [0.0] * 4, 0.0, "length")
    found = study._errors(model, prompt, answer)
    states = model(torch.tensor([prompt + said[:-1]])).hidden_states
    at = len(prompt) + 1
    for layer, before in ((3, states[2]), (4, states[3])):
        block = model.layers[layer - 1]
        assert isinstance(block, Block)
        mine, exact = (block.self_attn.v_proj(block.input_layernorm(h[0, at])) for h in (states[1], before))
        wanted = ((mine - exact).norm() / exact.norm()).item()
        total, count = found["values", 1, layer]
        assert count == 1
        assert total == pytest.approx(wanted, rel=1e-5)


def test_weights_are_those_of_attention() -> None:
    model = tiny_model(sliding_window=5, model_type="mistral")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    layout, block = model.layout(ids), model.layers[0]
    assert isinstance(block, Block)
    h = model.embed(ids)
    q, k, v = study._projected(block, h, layout)
    weights = study._attention(q, k, layout, block)
    out = torch.einsum("hts,she->the", weights, v.repeat_interleave(2, dim=1)).flatten(1)
    wanted = block.self_attn(block.input_layernorm(h), layout)[0]
    torch.testing.assert_close(block.self_attn.o_proj(out), wanted)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    model, out = str(folder / "model"), ["--out", str(tmp_path)]
    with pytest.raises(OfframpError, match="study 'x' is unknown; choose one of position, kv-error"):
        main(["x", model, "--task", "docstrings", *out])
    with pytest.raises(OfframpError, match="perplexity has none"):
        main(["position", model, "--task", "perplexity", "--data", str(folder / "text.txt"), *out])
    with pytest.raises(OfframpError, match="no token left early"):
        run(folder, "kv-error", tmp_path, "--threshold", "1")
