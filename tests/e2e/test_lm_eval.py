"""lm-eval as it is, asking either backend: its numbers are those of transformers.

The tokenizer is the checkpoint's, from its folder; tasks are YAML and JSON Lines as anybody would write them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.behind import Behind
from helpers.torchserve import NAME, make_checkpoint

evaluator = pytest.importorskip("lm_eval.evaluator")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

pytestmark = pytest.mark.slow

# Sums of at most 60 float32 log-probabilities of about -10 each, by two orders of summation.
NEAR = 2e-3
NEW_TOKENS = 10
QUESTIONS: list[dict[str, Any]] = [
    {"question": "Tiny random models", "choices": [" say one token for ever", " wander"], "answer": 0},
    {"question": "The weights are drawn", "choices": [" wider", " never", " so that 1 and 2"], "answer": 1},
    {"question": "Größe: 漢字 und", "choices": [" 字", " é", " x"], "answer": 2},
    {"question": "", "choices": ["nothing came before", "it began"], "answer": 0},
]


class Oracle:
    """The same checkpoint in transformers, one text at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-probability of the continuation, and whether it is the greedy one."""
        whole = self.encode(context + continuation)
        begin = len(self.encode(context))
        if not begin:
            whole, begin = [self._tokenizer.bos_token_id, *whole], 1
        logprobs = self._model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        said = [logprobs[at - 1, whole[at]].item() for at in range(begin, len(whole))]
        best = [logprobs[at - 1].max().item() for at in range(begin, len(whole))]
        return math.fsum(said), said == best

    @torch.no_grad()
    def text(self, prompt: str) -> str:
        """What the whole model says greedily."""
        ids = self.encode(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
        return self._tokenizer.decode(ids[-NEW_TOKENS:], skip_special_tokens=True)

    def chat(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("oracle") / "checkpoint")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "questions.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {
        **common,
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    write = {
        **common,
        "task": "write",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer",
        # What lm-eval does not know it passes on.
        "generation_kwargs": {
            "until": ["<|never|>"],
            "max_gen_toks": NEW_TOKENS,
            "offramp": {"exit_policy": "full"},
        },
        "metric_list": [{"metric": "exact_match"}],
    }
    read = {
        **common,
        "task": "read",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    for task in (choose, write, read):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def key(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", behind.key)


def evaluate(behind: Behind, model: str, path: str, tasks: Path, wanted: list[str], **more: Any) -> dict[str, Any]:
    arguments = {
        "model": NAME,
        "base_url": f"{behind.opened.server.url}/v1/{path}",
        "max_length": 1000,
        **more.pop("model_args", {}),
    }
    return evaluator.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=wanted,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **more,
    )


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(("batch_size", "num_concurrent"), [(1, 1), (3, 2)])
def test_completions(
    behind: Behind, tasks: Path, checkpoint: Path, oracle: Oracle, batch_size: int, num_concurrent: int
) -> None:
    found = evaluate(
        behind,
        "local-completions",
        "completions",
        tasks,
        ["choose", "read", "write"],
        model_args={"tokenizer": str(checkpoint), "num_concurrent": num_concurrent},
        batch_size=batch_size,
    )
    samples = found["samples"]
    right = 0
    for sample, asked in zip(samples["choose"], QUESTIONS, strict=True):
        wanted = [oracle.likelihood(asked["question"], choice) for choice in asked["choices"]]
        for (said,), (logprob, greedy) in zip(sample["resps"], wanted, strict=True):
            assert said[0] == pytest.approx(logprob, abs=NEAR)
            assert said[1] == greedy
        likeliest = max(range(len(wanted)), key=lambda choice: wanted[choice][0])
        right += likeliest == asked["answer"]
    assert found["results"]["choose"]["acc,none"] == right / len(QUESTIONS)
    for sample, asked in zip(samples["read"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == pytest.approx(oracle.likelihood("", asked["choices"][0])[0], abs=NEAR)
    for sample, asked in zip(samples["write"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == oracle.text(f"Question: {asked['question']}\nAnswer:")


@pytest.mark.usefixtures("key")
def test_chat(behind: Behind, tasks: Path, oracle: Oracle) -> None:
    found = evaluate(behind, "local-chat-completions", "chat/completions", tasks, ["write"], apply_chat_template=True)
    for sample, asked in zip(found["samples"]["write"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == oracle.text(oracle.chat(f"Question: {asked['question']}\nAnswer:"))
