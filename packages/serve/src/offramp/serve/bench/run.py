"""A whole benchmark: the experiments of a plan, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from offramp.common.checkpoint import AnyCheckpoint, open_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.tokenizer import load_tokenizer
from offramp.serve.bench import quality
from offramp.serve.bench.contestants import Contestant
from offramp.serve.bench.engine_contestant import EngineShelf
from offramp.serve.bench.measure import Measured, Note, compare
from offramp.serve.bench.peer import Peer
from offramp.serve.bench.plan import Choices, Experiment, PlanName, Variant, Workload, fields, full_plan, quick_plan
from offramp.serve.bench.prompts import PromptLines, Prompts, RandomTokens, read_prompts
from offramp.serve.bench.quality import Answers, Quality, References
from offramp.serve.bench.transformers_contestant import Transformers


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        repetitions: runs of each contestant on each workload.
        prompts: file to take prompts from; None: those of `references`, else random tokens.
        references: file of prompts with references, to measure the quality of the engine's texts; None: nobody asks.
        until_eos: sequences end at the model's end-of-sequence tokens; otherwise all get as many tokens as asked.
        transformers: `generate` of transformers takes part.
        assistant_layers: it also takes part with `assistant_early_exit` at this layer; None: it does not.
        peers: name -> command of the worker of another engine.
    """

    repetitions: int = 3
    prompts: Path | None = None
    references: Path | None = None
    until_eos: bool = False
    transformers: bool = False
    assistant_layers: int | None = None
    peers: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """A checkpoint with all that is to be measured of it.

    Attributes:
        experiments: what will be run.
    """

    def __init__(self, path: Path, plan: PlanName, choices: Choices, settings: Settings) -> None:
        """Read the checkpoint's settings and make the plan.

        Raises:
            OfframpError: the checkpoint, the prompts or the choices do not fit together.
        """
        checkpoint, _ = open_any_checkpoint(path, verify=False)
        wanted = {*choices.static_layers, *(() if choices.exit_at is None else (choices.exit_at,))}
        self._exits: ExitConfig | None = None
        if not checkpoint.exits.layers and wanted:
            self._exits = ExitConfig(tuple(sorted(wanted)), "final")
        self._path, self._settings = path, settings
        self._references = self._read_references(choices)
        self._answers: dict[tuple[Variant, int, int], Answers] = {}
        self._prompts = self._read_prompts(checkpoint.model.config.vocab_size)
        policy = checkpoint.policy
        choices = replace(
            choices,
            has_policy=policy is not None,
            has_shortlist=policy is not None and policy.shortlist is not None,
        )
        self.experiments = quick_plan(choices) if plan == "quick" else full_plan(choices)
        self._check(checkpoint, choices)

    def _check(self, checkpoint: AnyCheckpoint, choices: Choices) -> None:
        """Raise `OfframpError` for a choice with which no variant can be; where only some cannot, that is a note."""
        possible: set[str] = set()
        faults: dict[str, OfframpError] = {}
        for experiment in self.experiments:
            shelf = EngineShelf(self._path, self._exits, experiment.workloads)
            for variant in experiment.variants:
                try:
                    shelf.check(variant, checkpoint)
                except OfframpError as fault:
                    faults.update(dict.fromkeys(variant.choices, fault))
                else:
                    possible.update(variant.choices)
        for choice, fault in faults.items():
            if choice not in possible:
                raise fault
        # A plan leaves out what means nothing for it, and values that it does not come to; they can be wrong too.
        shelf = EngineShelf(self._path, self._exits, self.experiments[0].workloads)
        for name, values in choices.engine.items():
            for value in values:
                variant = Variant(fields(**{name: value}))
                if not possible.issuperset(variant.choices):
                    shelf.check(variant, checkpoint)

    def _read_references(self, choices: Choices) -> References | None:
        path = self._settings.references
        if path is None:
            return None
        quality.check_installed()
        references = quality.read_references(path, load_tokenizer(self._path))
        longest = max(map(len, references.prompts))
        if longest > min(choices.prompt_tokens):
            raise OfframpError(
                f"{path} has a prompt of {longest} tokens, and a workload has seats for {min(choices.prompt_tokens)}; "
                "raise --prompt-tokens."
            )
        return references

    def _read_prompts(self, vocab_size: int) -> Prompts:
        if self._settings.prompts is not None:
            return read_prompts(self._settings.prompts, load_tokenizer(self._path))
        return RandomTokens(vocab_size) if self._references is None else PromptLines(self._references.prompts)

    def run(self, experiment: Experiment) -> Iterator[list[Measured | Note]]:
        """The results of one experiment, workload by workload."""
        with self._contestants(experiment) as (contestants, notes):
            for load in experiment.workloads:
                settings = self._settings
                found = list(
                    compare(experiment.name, contestants, load, self._prompts, settings.repetitions, settings.until_eos)
                )
                notes += self._judge(experiment, contestants, load, found)
                yield [*notes, *found]
                notes.clear()
        gc.collect()  # the engines of the next experiment need the memory of these

    def _judge(
        self,
        experiment: Experiment,
        contestants: Sequence[Contestant],
        load: Workload,
        found: Sequence[Measured | Note],
    ) -> list[Note]:
        """Measure the quality of the engine's variants, beside that of the first: full depth."""
        notes: list[Note] = []
        if self._references is None:
            return notes
        by_variant = {one.who.variant: one for one in contestants if one.who.variant is not None}
        base = by_variant.get(experiment.variants[0])
        for measured in found:
            variant = None if isinstance(measured, Note) else measured.who.variant
            if isinstance(measured, Note) or variant is None or base is None:
                continue
            try:
                mine = self._answer(by_variant[variant], variant, experiment, load)
                measured.quality = Quality.of(mine, self._answer(base, experiment.variants[0], experiment, load))
            except OfframpError as fault:
                notes.append(Note(measured.who.name, f"quality: {fault}"))
        return notes

    def _answer(self, contestant: Contestant, variant: Variant, experiment: Experiment, load: Workload) -> Answers:
        """Answers to the references' prompts: once, where they do not depend on the batch, at the largest one."""
        assert self._references is not None
        batch = load.batch if variant.depends_on_batch else max(one.batch for one in experiment.workloads)
        key = (variant, batch, load.new_tokens)
        if key not in self._answers:
            self._answers[key] = quality.answers(contestant, self._references, batch, load.new_tokens)
        return self._answers[key]

    @contextmanager
    def _contestants(self, experiment: Experiment) -> Iterator[tuple[list[Contestant], list[Note]]]:
        """Those who take part, and why others cannot."""
        contestants: list[Contestant] = []
        notes: list[Note] = []
        with ExitStack() as stack:
            for name, make in self._makers(experiment):
                try:
                    one = make()
                except (OfframpError, ImportError) as fault:
                    notes.append(Note(name, str(fault)))
                else:
                    stack.callback(one.close)
                    contestants.append(one)
            # A full collection walks over all that loading made: hundreds of milliseconds in the middle of a run.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            yield contestants, notes

    def _makers(self, experiment: Experiment) -> Iterator[tuple[str, Callable[[], Contestant]]]:
        path, settings, loads = self._path, self._settings, experiment.workloads
        shelf = EngineShelf(path, self._exits, loads)
        for variant in experiment.variants:
            yield variant.name, partial(shelf.contestant, variant)
        if not experiment.peers:
            return
        dtypes = dict.fromkeys(variant.setting("dtype") for variant in experiment.variants)
        for dtype in dtypes:
            if settings.transformers:
                yield "transformers", partial(Transformers, path, dtype)
            if (layers := settings.assistant_layers) is not None:
                yield "transformers, drafting", partial(Transformers, path, dtype, layers)
            for name, command in settings.peers.items():
                yield name, partial(Peer, name, command, path, dtype, loads)
