"""Quality against output position, with keys and values of skipped layers exact, filled and masked.

If filling did harm, and harm added up, answers under it would leave the full model's sooner the longer they get than
answers whose cache is exact. The same policy decides in all three who leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offramp.common.checkpoint import load_any_checkpoint
from offramp.common.t5.model import MultiExitT5
from offramp.common.tokenizer import load_tokenizer
from offramp.evaluate import bootstrap
from offramp.evaluate.answering import Answerer, Setting
from offramp.evaluate.reproduce.answers import FULL, Questions, early, engine_config, to_full
from offramp.evaluate.reproduce.masked import generate_masked
from offramp.evaluate.reproduce.paper import TECHNIQUES, policy
from offramp.evaluate.rouge import rouge
from offramp.serve.request.exit_options import ExitOptions

LENGTHS = (4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Tokens from the start of an answer that are compared."""


def measure_positions(model: Path, calibration: Any, questions: Questions, max_tokens: int, device: str) -> Any:
    """Curves of every measure at its chosen threshold, on the same sources."""
    answerer, config = Answerer(model), engine_config(device)
    checkpoint = load_any_checkpoint(model)
    naive = checkpoint.model
    assert isinstance(naive, MultiExitT5)
    naive.eval()
    layers, num_layers = tuple(checkpoint.exits.layers), naive.config.num_layers
    tokenizer: Any = load_tokenizer(model)

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    full = [a.token_ids for a in answerer.answer(Setting("full", FULL, config), questions.prompts, max_tokens).given]
    longest = max(map(len, full))
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    found: dict[str, Any] = {}
    for technique in TECHNIQUES:
        chosen = policy(technique, calibration["techniques"][technique]["threshold"], layers)
        # As many tokens may be incomplete as an answer has: nobody runs deeper than the policy wants.
        exact = Setting("exact", ExitOptions("recompute", chosen, max_pending=max_tokens), config)
        answers: dict[str, list[tuple[list[int], list[int]]]] = {
            setting.name: [
                (answer.token_ids, answer.exit_layers)
                for answer in answerer.answer(setting, questions.prompts, max_tokens).given
            ]
            for setting in (exact, early("filled", chosen, config))
        }
        masked = [
            generate_masked(naive, prompt, max_tokens, chosen, checkpoint.eos_token_ids) for prompt in questions.prompts
        ]
        answers["masked"] = [(one.token_ids, one.exit_layers) for one in masked]
        found[technique] = {
            name: _curve([ids for ids, _ in given], full, lengths, text, questions)
            | {"exit_rate": 1 - sum(sum(d) for _, d in given) / (num_layers * sum(len(d) for _, d in given))}
            for name, given in answers.items()
        }
        texts = {name: [text(ids) for ids, _ in given] for name, given in answers.items()}
        label = {name: list(rouge(said, questions.references)["rougeL"]) for name, said in texts.items()}
        whole = [text(ids) for ids in full]
        similar = {name: to_full(said, whole) for name, said in texts.items()}
        for a, b in (("filled", "exact"), ("masked", "filled")):
            found[technique][f"{a}_less_{b}"] = {
                "to_label": bootstrap.difference(label[a], label[b])._asdict(),
                "to_full": bootstrap.difference(similar[a], similar[b])._asdict(),
            }
    return {"prompts": len(questions.prompts), "lengths": lengths, "techniques": found}


def _curve(
    said: Sequence[list[int]],
    full: Sequence[list[int]],
    lengths: Sequence[int],
    text: Any,
    questions: Questions,
) -> dict[str, Any]:
    """Of beginnings of answers: ROUGE-L to the full model's, and the share that are the full model's to the token."""
    pairs = list(zip(said, full, strict=True))
    similar = [
        bootstrap.mean(to_full([text(a[:n]) for a, _ in pairs], [text(b[:n]) for _, b in pairs]))._asdict()
        for n in lengths
    ]
    same = [sum(a[:n] == b[:n] for a, b in pairs) / len(pairs) for n in lengths]
    label = bootstrap.mean(list(rouge([text(a) for a in said], questions.references)["rougeL"]))._asdict()
    return {"to_full": similar, "same": same, "to_label": label}
