"""Tasks of lm-eval, through its Python API, asked of the engine: `--task lm-eval:NAME`.

What lm-eval wants written is generated under the setting, KV policy and batching included. What it wants to know the
likelihood of is read with exact keys and values (see `offramp.evaluate.reading`), each token by the exit at which it
would leave. Needs lm-eval: `pip install "offramp-evaluate[lm-eval]"`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import numbers
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.common.tokenizer import encode_text
from offramp.evaluate import bootstrap
from offramp.evaluate.answering import Answer, Answerer, Answers, Setting
from offramp.evaluate.evaluation import BASELINE, FULL_DEPTH, Asked, about_model, described, policy_of
from offramp.evaluate.figures import of_answers, of_reading
from offramp.evaluate.reading import Part, Read, Reader, text_parts
from offramp.serve.config import EngineConfig
from offramp.serve.request.exit_options import ExitOptions

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

PREFIX = "lm-eval:"
_MAX_TOKENS = 256  # lm-eval's own default


@dataclass
class Told:
    """What a model was asked by lm-eval, and what it did.

    Attributes:
        answers: that it wrote, in the order asked.
        reads: texts whose likelihood it told.
    """

    answers: list[Answer] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


def check_installed() -> None:
    """Raise `OfframpError` if there is no lm-eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise OfframpError('tasks of lm-eval need it; pip install "offramp-evaluate[lm-eval]".')


def evaluate_lm_eval(
    name: str,
    asked: Asked,
    *,
    limit: int | None = None,
    definitions: Path | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Ask a task of lm-eval at full depth and under every setting.

    Args:
        name: of the task.
        asked: of whom and how.
        limit: examples, from the front.
        definitions: a folder of tasks in YAML, in place of those that lm-eval brings.
        tell: told what comes next.

    Returns:
        Results of kind `evaluation`, but for the circumstances. Scores are lm-eval's for each example, with our
        intervals; `models`, `settings` and all other figures are those of built-in tasks.

    Raises:
        OfframpError: there is no such task, or it cannot be asked here.
    """
    check_installed()
    full = Setting(FULL_DEPTH, ExitOptions("full"), asked.settings[0].engine if asked.settings else _ENGINE)
    runs = [(setting, "model", asked.model) for setting in (full, *asked.settings)]
    if asked.baseline is not None:
        runs.append((replace(full, name=BASELINE), BASELINE, asked.baseline))
    settings: list[Any] = []
    reference: tuple[Told, dict[str, list[float]]] | None = None
    samples: list[dict[str, Any]] = []
    for setting, model, path in runs:
        tell(setting.name)
        answerer, told = Answerer(path), Told()
        found = _simple_evaluate(name, _model(answerer, setting, told, asked), limit, definitions, asked.chat)
        scored, samples = _scores(found["samples"][name]), found["samples"][name]
        reference = reference or (told, scored)
        checkpoint = answerer.engine(setting.engine).checkpoint
        layers = checkpoint.model.config.num_layers
        figures = {key: bootstrap.mean(values) for key, values in scored.items()}
        figures |= {f"{key}_ratio": bootstrap.ratio(scored[key], reference[1][key]) for key in scored}
        depths: Counter[int] = Counter()
        if told.answers:
            mine, theirs = (Answers(setting, one.answers, math.nan, math.nan) for one in (told, reference[0]))
            figures |= of_answers(mine, {}, theirs, {}, layers)
            depths += mine.depths
        if told.reads:
            figures |= of_reading(told.reads, layers)
            depths += Counter(layer for read in told.reads for layer in read.layers)
        settings.append(described(setting, model, policy_of(setting, checkpoint), figures, depths))
    assert reference is not None
    digest = hashlib.sha256("".join(str(sample["doc_hash"]) for sample in samples).encode()).hexdigest()
    main = next(iter(reference[1]), "layers_per_token")
    return {
        "task": {
            "name": f"{PREFIX}{name}",
            "kind": "write" if reference[0].answers else "choose",
            "main": main,
            "chat": asked.chat,
        },
        "data": {"path": None, "sha256": None, "examples": len(samples), "examples_sha256": digest},
        "models": {
            key: about_model(path)
            for key, path in (("model", asked.model), (BASELINE, asked.baseline))
            if path is not None
        },
        "settings": settings,
    }


_ENGINE = EngineConfig(prefix_caching=False)


def _simple_evaluate(name: str, model: TemplateLM, limit: int | None, definitions: Path | None, chat: bool) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    where = None if definitions is None else str(definitions)
    manager = TaskManager(include_path=where, include_defaults=definitions is None)
    if name not in manager.all_subtasks:
        raise OfframpError(f"lm-eval knows no task {name!r} here; name a task of its own, or give --definitions DIR.")
    return simple_evaluate(
        model,
        tasks=[name],
        limit=limit,
        task_manager=manager,
        apply_chat_template=chat,
        bootstrap_iters=0,  # the intervals are ours
        log_samples=True,
    )


def _scores(samples: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Metric -> its value for each example, where it has one that is a number."""
    names = dict.fromkeys(name for sample in samples for name in sample["metrics"])
    return {
        name: [float(sample[name]) for sample in samples]
        for name in names
        if all(isinstance(sample.get(name), numbers.Real) for sample in samples)
    }


def _model(answerer: Answerer, setting: Setting, told: Told, asked: Asked) -> TemplateLM:
    """The engine under a setting as lm-eval wants a model."""
    from lm_eval.api.model import TemplateLM

    engine = answerer.engine(setting.engine)
    tokenizer, checkpoint = engine.tokenizer, engine.checkpoint

    class OfframpModel(TemplateLM):
        """Writes and reads under the setting, and keeps what it did in `told`."""

        backend = "causal" if engine.max_source_len is None else "seq2seq"

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer: Any = tokenizer

        @property
        def eot_token_id(self) -> int:
            """Ends a text."""
            return checkpoint.eos_token_ids[0]

        @property
        def prefix_token_id(self) -> int:
            """Begins a text that nothing comes before."""
            begin = tokenizer.bos_token_id
            return begin if isinstance(begin, int) else self.eot_token_id

        @property
        def tokenizer_name(self) -> str:
            """Tells chat templates apart."""
            return str(answerer.path)

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            """Messages as a prompt."""
            return str(
                tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt)
            )

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            """Token ids; a chat template has written special tokens itself."""
            special = not asked.chat if add_special_tokens is None else add_special_tokens
            return encode_text(tokenizer, string, add_special_tokens=special)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """Greedy answers, those with the same limits together."""
            alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
            for index, request in enumerate(requests):
                alike[_limits(request.args[1], asked.max_tokens)].append(index)
            found: dict[int, Answer] = {}
            for (max_tokens, stop), indices in alike.items():
                room = engine.max_model_len - max_tokens if engine.max_source_len is None else engine.max_source_len
                if room < 1:
                    raise OfframpError(f"max_tokens {max_tokens} leaves no room for a prompt; lower --max-tokens.")
                # What is too long loses its beginning, as with lm-eval's own models.
                prompts = [self.tok_encode(requests[index].args[0])[-room:] for index in indices]
                answers = answerer.answer(setting, prompts, max_tokens, stop)
                found.update(zip(indices, answers.given, strict=True))
            in_order = [found[index] for index in range(len(requests))]
            told.answers += in_order
            return [answer.text for answer in in_order]

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            parts = [Part(given, predicted, 0) for _, given, predicted in requests]
            reads = self._read(parts)
            return [
                (
                    -read.nats,
                    list(part.predicted) == [read.readings[layer].best[at] for at, layer in enumerate(read.layers)],
                )
                for part, read in zip(parts, reads, strict=True)
            ]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Of whole texts, in windows."""
            found: list[float] = []
            for request in requests:
                parts = text_parts(checkpoint_of_reader(), tokenizer, request.args[0], asked.window)
                found.append(-sum(read.nats for read in self._read(parts)))
            return found

        def _read(self, parts: Sequence[Part]) -> list[Read]:
            if setting.exits.kv_policy in ("fill", "verify"):
                raise OfframpError(
                    "lm-eval asks for likelihoods here, which are read with exact keys and values, so the KV policy is "
                    f"recompute and not {setting.exits.kv_policy}; give --kv-policy recompute."
                )
            policy = policy_of(setting, checkpoint)
            way: int | ExitPolicy = checkpoint.model.config.num_layers if policy is None else policy
            (reads,) = Reader(checkpoint_of_reader(), [parts]).reads(way)
            told.reads.extend(reads)
            return reads

    loaded: list[Any] = []

    def checkpoint_of_reader() -> Any:
        # The engine has taken its weights apart to pack them; who only writes needs no second copy.
        from offramp.common.checkpoint import load_any_checkpoint

        if not loaded:
            loaded.append(load_any_checkpoint(answerer.path))
        return loaded[0]

    return OfframpModel()


def _limits(settings: dict[str, Any], max_tokens: int | None) -> tuple[int, tuple[str, ...]]:
    """Most tokens, and what ends an answer."""
    if settings.get("do_sample") and settings.get("temperature", 0) > 0:
        print("lm-eval's task asks for samples; answers here are greedy", file=sys.stderr)
    until = settings.get("until") or []
    stop = (until,) if isinstance(until, str) else tuple(until)
    return max_tokens or settings.get("max_gen_toks") or _MAX_TOKENS, stop
