"""What exits make of a text: the same as transformers, the probe and naive generation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.tiny import EOS_ID, tiny_checkpoint
from helpers.tiny_t5 import t5_directory
from offramp.common.checkpoint import load_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import generate
from offramp.common.tokenizer import load_tokenizer
from offramp.evaluate.reading import Part, Reader, choice_part, leaves_at, read, text_parts

POLICY = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3}, min_layer=2, decay=4.0)
TEXT = "Tiny random models are drawn wider, so that greedy text wanders."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", ExitConfig((1, 2, 3)), POLICY)


def test_the_last_exit_is_the_model(directory: Path) -> None:
    checkpoint, tokenizer = load_any_checkpoint(directory), load_tokenizer(directory)
    ids = tokenizer(TEXT)["input_ids"]
    (part,) = text_parts(checkpoint, tokenizer, TEXT, window=200)
    assert [*part.given, *part.predicted] == [0, *ids]
    assert part.num_bytes == len(TEXT)
    (((one,),)) = Reader(checkpoint, [[part]]).reads(4)
    logits = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[0, *ids]])).logits[0, :-1]
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
    assert one.nats == pytest.approx(wanted, rel=1e-5)
    assert all(one.agrees)


def test_windows_predict_every_token_once(directory: Path) -> None:
    checkpoint, tokenizer = load_any_checkpoint(directory), load_tokenizer(directory)
    text = TEXT + " 日本"
    parts = text_parts(checkpoint, tokenizer, text, window=7)
    assert [token for part in parts for token in part.predicted] == tokenizer(text)["input_ids"]
    assert [list(part.given) for part in parts[1:]] == [[part.predicted[-1]] for part in parts[:-1]]
    assert sum(part.num_bytes for part in parts) == len(text.encode())
    assert text_parts(checkpoint, tokenizer, "", window=7) == []
    for window in (0, 256):
        with pytest.raises(OfframpError, match=f"window {window} must be from 1 to 255"):
            text_parts(checkpoint, tokenizer, text, window)


@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        ExitPolicy("cosine", {1: 0.3, 2: 0.8}),
        ExitPolicy("max_probability", {1: 0.3, 2: 0.4}, shortlist=tuple(range(0, 300, 2))),
        ExitPolicy("entropy", {2: 0.2}, shortlist=tuple(range(100, 300)), shortlist_only=True),
    ],
)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_tokens_leave_where_naive_generation_lets_them(
    directory: Path, tmp_path: Path, policy: ExitPolicy, family: str
) -> None:
    if family == "t5":
        checkpoint = load_any_checkpoint(t5_directory(tmp_path / "t5"), exits=ExitConfig((1, 2, 3), "final"))
    else:
        checkpoint = load_any_checkpoint(directory)
    prompt = list(range(40, 60))
    # Without a limit of pending tokens, exact keys and values are what reading has.
    said = generate(checkpoint.model, prompt, 24, kv_policy="recompute", policy=policy, max_pending=1000)
    readings = read(checkpoint, prompt, said.token_ids, policy)
    layers = leaves_at(readings, policy, max_steps=24)
    assert layers[1:] == said.exit_layers[1:]  # the first comes from the prompt's pass
    assert [readings[layer].best[step] for step, layer in enumerate(layers)][1:] == said.token_ids[1:]
    assert len(set(said.exit_layers)) > 1


def test_agreement_and_likelihood_of_mixed_depths(directory: Path) -> None:
    checkpoint = load_any_checkpoint(directory)
    reader = Reader(checkpoint, [[Part([0], [40, 41, 42, EOS_ID], 4)]])
    ((mixed,),) = reader.reads(POLICY)
    by_layer = {layer: reader.reads(layer)[0][0] for layer in (1, 2, 3, 4)}
    wanted = math.fsum(by_layer[layer].readings[layer].logprobs[step] for step, layer in enumerate(mixed.layers))
    assert mixed.nats == pytest.approx(-wanted)
    final = by_layer[4].readings[4].best
    assert by_layer[1].agrees == [a == b for a, b in zip(by_layer[1].readings[1].best, final, strict=True)]


def test_a_text_is_read_once_for_all_thresholds_of_a_measure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(checkpoint: Any, given: Any, predicted: Any, policy: ExitPolicy) -> Any:
        calls.append(policy.measure)
        return read(checkpoint, given, predicted, policy)

    monkeypatch.setattr("offramp.evaluate.reading.read", counted)
    cosine = ExitPolicy("cosine", {1: 0.3})
    reader = Reader(load_any_checkpoint(directory), [[Part([0], [40, 41], 4)]], cosine)
    for way in (4, 1, cosine, cosine.with_threshold(0.5, (1, 2)), POLICY):
        reader.reads(way)
    assert calls == ["cosine", "margin"]


def test_choices_do_not_change_the_prompt(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    part = choice_part(tokenizer, [5, 6], " the")
    assert part.given == [5, 6]
    assert tokenizer.decode(list(part.predicted)) == " the"
    assert part.num_bytes == 4
    with pytest.raises(OfframpError, match="no token"):
        choice_part(tokenizer, [5, 6], "")


def test_an_encoder_reads_no_plain_text(tmp_path: Path) -> None:
    path = t5_directory(tmp_path / "t5")
    with pytest.raises(OfframpError, match="this model has an encoder"):
        text_parts(load_any_checkpoint(path), load_tokenizer(path), TEXT, 16)
