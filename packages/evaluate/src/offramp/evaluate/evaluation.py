"""An evaluation: one task, one or two models, full depth and every setting asked, in one run.

Its results are of kind `evaluation` (see `offramp.evaluate.results`):

    task       name, kind, main score, limits of an answer
    data       path and SHA-256 of the file, number and SHA-256 of the examples
    models     path, layers, exits, SHA-256 of the weights, for the model and the baseline
    settings   name, model, KV and exit policy, engine; figures with intervals; tokens by layers run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offramp.common.checkpoint import AnyCheckpoint, hashed_files, load_any_checkpoint, open_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.common.file_hash import sha256
from offramp.common.tokenizer import encode_text, load_tokenizer
from offramp.evaluate.answering import Answerer, Answers, Setting
from offramp.evaluate.examples import Example, sha256_of
from offramp.evaluate.figures import Figures, of_answers, of_choices, of_texts
from offramp.evaluate.reading import Read, Reader, choice_part, text_parts
from offramp.evaluate.tasks import Scores, Task
from offramp.serve.config import EngineConfig
from offramp.serve.request.exit_options import ExitOptions

FULL_DEPTH = "full depth"
BASELINE = "baseline"
_WARM_UP_TOKENS = 4
_ENGINE = EngineConfig(prefix_caching=False)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What is evaluated.

    Attributes:
        model: checkpoint directory.
        settings: beside full depth, which comes first in any case.
        baseline: another checkpoint directory, for its full depth; None: there is none.
        chat: prompts are put into the tokenizer's chat template, as a user's message.
        max_tokens: of an answer, in place of the task's own; None keeps that.
        window: tokens of a text that are read at once; see `text_parts`.
    """

    model: Path
    settings: Sequence[Setting]
    baseline: Path | None = None
    chat: bool = False
    max_tokens: int | None = None
    window: int | None = None


def evaluate(
    task: Task, examples: Sequence[Example], asked: Asked, data: Path | None, tell: Tell = lambda what: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run an evaluation.

    Args:
        task: how answers are scored.
        examples: what is asked.
        asked: of whom and how.
        data: the file that the examples come from.
        tell: told what comes next.

    Returns:
        Results, but for the circumstances; and for tasks of kind `write` a row for every answer.

    Raises:
        OfframpError: a model, a setting or a prompt does not fit.
    """
    if asked.max_tokens is not None:
        task = replace(task, max_tokens=asked.max_tokens)
    names = [setting.name for setting in asked.settings]
    if len(set(names)) < len(names) or FULL_DEPTH in names or BASELINE in names:
        raise OfframpError(f"settings need names of their own, and these are {', '.join(names)}.")
    full = Setting(FULL_DEPTH, ExitOptions("full"), asked.settings[0].engine if asked.settings else _ENGINE)
    measured = _write if task.kind == "write" else _read
    settings, rows = measured(task, examples, asked, full, tell)
    found = {
        "task": {
            "name": task.name,
            "kind": task.kind,
            "main": task.main,
            "chat": asked.chat,
            **({"max_tokens": task.max_tokens, "stop": task.stop} if task.kind == "write" else {}),
        },
        "data": {
            "path": data,
            "sha256": None if data is None else sha256(data),
            "examples": len(examples),
            "examples_sha256": sha256_of(examples),
        },
        "models": {
            name: about_model(path)
            for name, path in (("model", asked.model), (BASELINE, asked.baseline))
            if path is not None
        },
        "settings": settings,
    }
    return found, rows


def about_model(path: Path) -> dict[str, Any]:
    """What results say of a model."""
    checkpoint, _ = open_any_checkpoint(path)
    return {
        "path": path.resolve(),
        "layers": checkpoint.model.config.num_layers,
        "exits": list(checkpoint.exits.layers),
        "sha256": {file.name: sha256(file) for file in hashed_files(path)},
    }


def described(
    setting: Setting, model: str, policy: ExitPolicy | None, figures: Figures, depths: Mapping[int, int]
) -> Any:
    """What results say of a setting."""
    engine = asdict(setting.engine)
    default = asdict(EngineConfig())
    return {
        "name": setting.name,
        "model": model,
        "kv_policy": setting.exits.kv_policy,
        "static_layer": setting.exits.static_layer,
        "policy": None if policy is None else policy.to_json(),
        "engine": {name: value for name, value in engine.items() if value != default[name]},
        "figures": figures,
        "depths": {str(layer): depths[layer] for layer in sorted(depths)},
    }


def policy_of(setting: Setting, checkpoint: AnyCheckpoint) -> ExitPolicy | None:
    """What decides when tokens leave; None: nobody does."""
    return None if setting.exits.kv_policy in ("full", "static") else setting.exits.policy or checkpoint.policy


def prompts_of(path: Path, examples: Sequence[Example], chat: bool) -> list[list[int]]:
    """Token ids of all prompts.

    Raises:
        OfframpError: there is no chat template to put them into.
    """
    tokenizer = load_tokenizer(path)
    if not chat:
        return [encode_text(tokenizer, example.prompt) for example in examples]
    if not tokenizer.chat_template:
        raise OfframpError(f"the tokenizer of {path} has no chat template; leave --chat out.")
    found: list[list[int]] = []
    for example in examples:
        messages = [{"role": "user", "content": example.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(encode_text(tokenizer, str(text), add_special_tokens=False))
    return found


def _write(
    task: Task, examples: Sequence[Example], asked: Asked, full: Setting, tell: Tell
) -> tuple[list[Any], list[dict[str, Any]]]:
    assert task.score is not None
    runs: list[tuple[Setting, str, Path]] = [
        (full, "model", asked.model),
        *((setting, "model", asked.model) for setting in asked.settings),
    ]
    if asked.baseline is not None:
        runs.append((replace(full, name=BASELINE), BASELINE, asked.baseline))
    settings: list[Any] = []
    rows: list[dict[str, Any]] = []
    reference: tuple[Answers, Scores] | None = None
    answerer, prompts = Answerer(asked.model), list[list[int]]()
    for setting, model, path in runs:
        if not prompts or path != answerer.path:
            answerer, prompts = Answerer(path), prompts_of(path, examples, asked.chat)
        tell(setting.name)
        engine = answerer.engine(setting.engine)
        answerer.answer(setting, prompts[:1], _WARM_UP_TOKENS)
        answers = answerer.answer(setting, prompts, task.max_tokens, task.stop)
        scored = task.score(answers.texts, examples)
        reference = reference or (answers, scored)
        figures = of_answers(answers, scored, *reference, engine.checkpoint.model.config.num_layers)
        settings.append(described(setting, model, policy_of(setting, engine.checkpoint), figures, answers.depths))
        for index, answer in enumerate(answers.given):
            rows.append(
                {
                    "setting": setting.name,
                    "example": index,
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "exit_layers": answer.exit_layers,
                    "scores": {name: values[index] for name, values in scored.items()},
                }
            )
    return settings, rows


def _read(
    task: Task, examples: Sequence[Example], asked: Asked, full: Setting, tell: Tell
) -> tuple[list[Any], list[dict[str, Any]]]:
    for setting in asked.settings:
        if setting.exits.kv_policy in ("fill", "verify"):
            raise OfframpError(
                f"the task {task.name} reads texts with exact keys and values, so its KV policy is recompute and not "
                f"{setting.exits.kv_policy}; leave --kv-policy out."
            )
    tell(task.name)
    reader, final = _reader(task, examples, asked.model, asked)
    reference = reader.reads(final)
    ways: list[tuple[Setting, ExitPolicy | int]] = [
        (Setting(f"exit {layer}", ExitOptions("static", static_layer=layer), full.engine), layer)
        for layer in reader.checkpoint.exits.layers
    ]
    for setting in asked.settings:
        policy = policy_of(setting, reader.checkpoint)
        ways.append((setting, final if policy is None else policy))
    settings = [
        _read_by(setting, "model", way, task, examples, reader, final, reference)
        for setting, way in [(full, final), *ways]
    ]
    if asked.baseline is not None:
        tell(BASELINE)
        other, depth = _reader(task, examples, asked.baseline, asked)
        baseline = replace(full, name=BASELINE)
        settings.append(_read_by(baseline, BASELINE, depth, task, examples, other, depth, reference))
    return settings, []


def _reader(task: Task, examples: Sequence[Example], path: Path, asked: Asked) -> tuple[Reader, int]:
    """What reads the examples, and the number of its model's layers."""
    checkpoint, tokenizer = load_any_checkpoint(path), load_tokenizer(path)
    if task.kind == "read":
        texts = [text_parts(checkpoint, tokenizer, example.prompt, asked.window) for example in examples]
    else:
        texts = [
            [choice_part(tokenizer, prompt, choice) for choice in example.choices]
            for example, prompt in zip(examples, prompts_of(path, examples, asked.chat), strict=True)
        ]
    # By the first setting's measure, so that texts are read once where all settings have one.
    usual = asked.settings[0].exits.policy if asked.settings and path == asked.model else None
    return Reader(checkpoint, texts, usual), checkpoint.model.config.num_layers


def _read_by(
    setting: Setting,
    model: str,
    way: int | ExitPolicy,
    task: Task,
    examples: Sequence[Example],
    reader: Reader,
    num_layers: int,
    reference: Sequence[Sequence[Read]],
) -> dict[str, Any]:
    mine = reader.reads(way)
    if task.kind == "read":
        # Windows are what is drawn anew: of one long text there would be nothing to draw.
        flat, full = ([part for parts in reads for part in parts] for reads in (mine, reference))
        figures = of_texts(flat, full, num_layers)
    else:
        choices = [example.choices for example in examples]
        right = [example.answer or 0 for example in examples]
        figures = of_choices(mine, reference, choices, right, num_layers)
    depths = Counter(layer for parts in mine for part in parts for layer in part.layers)
    return described(setting, model, way if isinstance(way, ExitPolicy) else None, figures, depths)
