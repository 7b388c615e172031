"""`offramp generate` and `offramp archive` on an encoder-decoder directory, and the command that refuses one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import T5ForConditionalGeneration

from helpers.tiny import tiny_tokenizer
from helpers.tiny_t5 import EOS_ID, SHAPES, t5_directory
from offramp.common import cli
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.serve.torchserve.archive import archive


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A v1.1 with exits that share its head."""
    root = tmp_path_factory.mktemp("t5")
    t5_directory(root / "hf", **SHAPES["v1.1"])
    import_model(str(root / "hf"), root / "model", exits=NewExits(ExitConfig((1, 3), "final", classifier=True)))
    return root / "model"


def ask(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> list[dict[str, Any]]:
    assert cli.main(["generate", str(directory), "--json", "--max-tokens", "10", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_text_is_that_of_transformers(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs: Any = T5ForConditionalGeneration.from_pretrained(directory)
    tokenizer = tiny_tokenizer(chat_template=False)
    texts = ["drawn wider", "so that greedy text wanders", "a"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(text) for text in texts))
    rows = ask(capsys, directory, "--prompts", str(tmp_path / "prompts.jsonl"))
    for text, row in zip(texts, rows, strict=True):
        source = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = theirs.generate(source, max_new_tokens=10, do_sample=False)[0, 1:].tolist()
        assert row["token_ids"] == expected
        assert row["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert row["exit_layers"] == [4] * len(expected)
        assert row["finish_reason"] == ("stop" if expected[-1] == EOS_ID else "length")
        assert row["usage"] == {"prompt_tokens": source.shape[1], "completion_tokens": len(expected)}


def test_exits_follow_the_options(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*options: str) -> list[int]:
        return ask(capsys, directory, "--prompt", "hello", "--ignore-eos", *options)[0]["exit_layers"]

    assert layers("--threshold", "-2", "--measure", "cosine") == [4] + [1] * 9
    assert layers("--threshold", "-2", "--min-exit-layer", "3", "--dtype", "bf16") == [4] + [3] * 9
    assert layers("--kv-policy", "static", "--exit-layer", "3") == [4] + [3] * 9
    assert layers("--kv-policy", "recompute", "--threshold", "-2", "--max-pending", "2") == [4, 1, 1] * 3 + [4]
    assert layers("--kv-policy", "full") == [4] * 10
    # They were never trained: half sure of everything.
    assert layers("--threshold", "0.49", "--measure", "classifier", "--min-exit-layer", "2") == [4] + [3] * 9
    assert layers("--threshold", "0.5", "--measure", "classifier") == [4] * 10


def test_the_options_of_the_engine_are_taken(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask(capsys, directory, "--prompt", "hello", "--n", "2", "--temperature", "1", "--seed", "1", "--ignore-eos")
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    [row] = ask(capsys, directory, "--prompt", "hello", "--regex", "[ab]{3}")
    assert re.fullmatch("[ab]{3}", row["text"])


def test_a_probe_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(directory), "--prompt", "hello", "--probe"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("offramp: error: a probe reads a text with every exit of a decoder-only model")


def test_messages_need_a_chat_template(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    assert cli.main(["generate", str(directory), "--prompts", str(tmp_path / "chat.jsonl")]) == 1
    assert "chat.jsonl, line 1: This model's tokenizer has no chat template" in capsys.readouterr().err


def test_it_is_archived(directory: Path, tmp_path: Path) -> None:
    folder = archive(directory, tmp_path / "m", name="m")
    assert (folder / "checkpoint" / "exits.json").is_file()
