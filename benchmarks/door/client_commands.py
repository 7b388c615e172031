"""Clients that are commands of their own, run as they come from PyPI: lm-eval, `vllm bench serve` and schemathesis."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from benchmarks.door.servers import Door

CLIENT_LIMIT_S = 4 * 3600.0
MAX_LENGTH = 400
"""Tokens that lm-eval takes the model to have; whatever is asked here is shorter."""

_WORDS = [
    "Tiny",
    "random",
    "models",
    "say",
    "one",
    "token",
    "for",
    "ever",
    "so",
    "that",
    "1",
    "and",
    "2",
    "are",
    "drawn",
    "wider",
    "or",
    "never:",
    "Größe",
    "漢字",
    "é.",
]


@dataclass
class Ran:
    """What a command has done.

    Attributes:
        what: It was told to do.
        faults: What was wrong; none if all is well.
        figures: What it has found out; the same for every backend, up to rounding.
    """

    what: str
    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def lm_eval(command: Sequence[str], door: Door, checkpoint: Path, folder: Path, *, documents: int) -> list[Ran]:
    """Tasks of this machine's own by each of its OpenAI models: choosing, reading and writing; chats only write."""
    folder.mkdir(parents=True)
    _write_tasks(folder, documents)
    asked: list[tuple[str, str, list[str], list[str]]] = [
        ("local-completions", "completions", ["choose", "read", "write"], [f"tokenizer={checkpoint.resolve()}"]),
        ("local-chat-completions", "chat/completions", ["write"], []),
    ]
    done: list[Ran] = []
    for model, path, tasks, more in asked:
        given = [
            f"model={door.model}",
            f"base_url={_url(door)}/v1/{path}",
            "num_concurrent=8",
            f"max_length={MAX_LENGTH}",
        ]
        options = ["run", "--model", model, "--model_args", ",".join([*given, *more]), "--tasks", ",".join(tasks)]
        options += ["--include_path", str(folder.resolve()), "--output_path", f"{model}.json"]
        if path != "completions":
            options.append("--apply_chat_template")
        # The tasks are files of this machine, and nothing is to be asked of a hub.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder.resolve() / "hub")}
        ran = Ran(f"{model}: {', '.join(tasks)}, {documents} documents each")
        ran.faults += _run([*command, *options], folder / f"{model}.log", door, offline)
        for said in folder.glob(f"{model}*.json"):
            for task, results in json.loads(said.read_text())["results"].items():
                ran.figures |= {f"{task} {name}": value for name, value in results.items() if isinstance(value, float)}
        if len(ran.figures) < len(tasks) or not all(map(math.isfinite, ran.figures.values())):
            ran.faults.append(f"results are missing or no numbers: {ran.figures}")
        done.append(ran)
    return done


def vllm_bench(command: Sequence[str], door: Door, checkpoint: Path, folder: Path, *, requests: int) -> list[Ran]:
    """Random prompts as streams, 16 at a time, to each endpoint."""
    folder.mkdir(parents=True)
    done: list[Ran] = []
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        options = ["bench", "serve", "--backend", backend, "--base-url", _url(door), "--endpoint", path]
        options += ["--model", door.model, "--tokenizer", str(checkpoint.resolve()), "--dataset-name", "random"]
        options += ["--random-input-len", "64", "--random-output-len", "32", "--num-prompts", str(requests)]
        options += ["--max-concurrency", "16", "--ignore-eos", "--seed", "0", "--disable-tqdm"]
        options += ["--save-result", "--result-dir", ".", "--result-filename", f"{backend}.json"]
        ran = Ran(f"bench serve --backend {backend}")
        ran.faults += _run([*command, *options], folder / f"{backend}.log", door, {"HF_HUB_OFFLINE": "1"})
        if (folder / f"{backend}.json").exists():
            said = json.loads((folder / f"{backend}.json").read_text())
            ran.figures["output tokens"] = said["total_output_tokens"]
            if said["completed"] != requests or said["total_output_tokens"] != 32 * requests:
                told = {name: said[name] for name in ("completed", "failed", "total_output_tokens") if name in said}
                ran.faults.append(f"of {requests} requests of 32 tokens: {told}")
        done.append(ran)
    return done


def schemathesis(
    command: Sequence[str], door: Door, folder: Path, *, vocabulary: int, cases: int, seed: int
) -> list[Ran]:
    """Right and wrong requests until there were so many: its other phases first, then more and more of its fuzzing.

    Every other time hooks bring requests nearer to what this model could answer.
    """
    folder.mkdir(parents=True)
    fitting = {
        "SCHEMATHESIS_HOOKS": "benchmarks.door.schemathesis_hooks",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "OFFRAMP_FITTING_MODEL": door.model,
        "OFFRAMP_FITTING_VOCABULARY": str(vocabulary),
    }
    done: list[Ran] = []
    generated = 0
    while generated < cases:
        phases, examples = (["fuzzing"], 700) if done else (["examples", "coverage", "stateful"], 100)
        fits = len(done) % 2 == 1
        options = ["run", f"{_url(door)}/openapi.json", "-H", f"Authorization: Bearer {door.key}"]
        options += ["--phases", ",".join(phases), "--seed", str(seed + len(done)), "--max-examples", str(examples)]
        # A document cannot say all that a model cannot do: a context that is too long is a 400.
        options += ["--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color"]
        options += ["--request-timeout", "300", "--generation-database", "none", "--output-truncate", "false"]
        log = folder / f"{len(done)}.log"
        ran = Ran(f"seed {seed + len(done)}: {', '.join(phases)}{' near to what can be answered' if fits else ''}")
        ran.faults += _run([*command, *options], log, door, fitting if fits else {})
        said = log.read_text()
        found = re.search(r"Test cases:\s+([\d,]+) generated", said)
        if found is None:
            ran.faults.append("it does not say how many cases there were")
            return [*done, ran]
        number = int(found[1].replace(",", ""))
        ran.what += f"; {number} cases"
        ran.faults += re.findall(r"^ +(?:❌|🚫) (.*: \d+)$", said, re.MULTILINE)
        generated += number
        done.append(ran)
    return done


def _run(command: Sequence[str], log: Path, door: Door, more: Mapping[str, str]) -> list[str]:
    """Runs it to its end with the door's key; what was wrong, if only that."""
    environment = {**os.environ, "OPENAI_API_KEY": door.key, **more}
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                cwd=log.parent,  # some leave files of their own there
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CLIENT_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return [f"it did not end within {CLIENT_LIMIT_S:.0f} s"]
    return [] if code == 0 else [f"exit code {code}, see {log}"]


def _url(door: Door) -> str:
    return f"http://127.0.0.1:{door.port}"


def _write_tasks(folder: Path, documents: int) -> None:
    """Three tasks as anybody would write them, over questions at random."""
    source = random.Random(0)

    def words(most: int) -> str:
        return " ".join(source.choices(_WORDS, k=source.randint(1, most)))

    questions = [
        {"question": words(12), "choices": [f" {words(4)}" for _ in range(source.randint(2, 4))], "answer": 0}
        for _ in range(documents)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder.resolve() / "questions.jsonl")},
            "cache_dir": str(folder.resolve() / "cache"),
        },
        "test_split": "test",
    }
    tasks: dict[str, dict[str, Any]] = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "target_delimiter": "",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
        "read": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
