"""Answers of the experiment's models in the engine, and what they are worth.

Legend of counts: L decoder layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offramp.common.exits.policy import ExitPolicy
from offramp.common.tokenizer import encode_text, load_tokenizer
from offramp.evaluate.answering import Answers, Setting
from offramp.evaluate.reproduce.tasks import Task, read_rows
from offramp.evaluate.rouge import rouge
from offramp.serve.config import EngineConfig, SyncPolicy
from offramp.serve.request.exit_options import ExitOptions

FULL = ExitOptions("full")


@dataclass(frozen=True)
class Questions:
    """What models are asked.

    Attributes:
        prompts: token ids of sources, cut to what the task reads.
        references: what people wrote for each.
    """

    prompts: list[list[int]]
    references: list[list[str]]

    def first(self, count: int) -> Questions:
        """The first of them."""
        return Questions(self.prompts[:count], self.references[:count])


def read_questions(file: Path, tokenizer: Path, task: Task, limit: int) -> Questions:
    """The first `limit` sources of a file that are short enough for the task."""
    loaded = load_tokenizer(tokenizer)
    prompts: list[list[int]] = []
    references: list[list[str]] = []
    for row in read_rows(file):
        ids = encode_text(loaded, row["source"])
        if task.max_source_tokens is not None and len(ids) > task.max_source_tokens:
            continue
        if len(ids) > task.source_tokens:  # as in training: the end of the source stays its end
            ids = [*ids[: task.source_tokens - 1], ids[-1]]
        prompts.append(ids)
        references.append(row["references"])
        if len(prompts) == limit:
            break
    return Questions(prompts, references)


def engine_config(device: str, sync: SyncPolicy = "regroup", batch: int = 16) -> EngineConfig:
    """Settings of an engine that keeps nothing from one question for the next."""
    budget = max(1024, batch)
    return EngineConfig(
        sync_policy=sync,
        max_num_seqs=batch,
        max_tokens_per_iteration=budget,
        prefix_caching=False,
        device=device,
    )


def early(name: str, policy: ExitPolicy, config: EngineConfig) -> Setting:
    """Tokens leave by a policy; skipped layers are filled, as in the paper."""
    return Setting(name, ExitOptions("fill", policy), config)


def exit_rate(answers: Answers, num_layers: int) -> float:
    """Share of decoder layers that all generated tokens skipped, on average (Table 1)."""
    run = sum(sum(answer.exit_layers) for answer in answers.given)
    return 1 - run / (num_layers * answers.num_tokens)


def to_label(answers: Answers, questions: Questions) -> list[float]:
    """ROUGE-L of each answer to the best of what people wrote."""
    return list(rouge(answers.texts, questions.references)["rougeL"])


def to_full(texts: Sequence[str], full: Sequence[str]) -> list[float]:
    """ROUGE-L of each answer to that of the full model."""
    return list(rouge(texts, [[text] for text in full])["rougeL"])
