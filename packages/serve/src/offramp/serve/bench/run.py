"""A whole benchmark: the experiments of a plan, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.tokenizer import load_tokenizer
from offramp.serve.bench.contestants import Contestant, EngineShelf, Peer, Transformers
from offramp.serve.bench.measure import Measured, Note, compare
from offramp.serve.bench.plan import Choices, Experiment, PlanName, full_plan, quick_plan
from offramp.serve.bench.prompts import Prompts, RandomTokens, read_prompts
from offramp.serve.config import Dtype


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        repetitions: runs of each contestant on each workload.
        prompts: file to take prompts from; None draws random tokens.
        until_eos: sequences end at the model's end-of-sequence tokens; otherwise all get as many tokens as asked.
        transformers: `generate` of transformers takes part.
        assistant_layers: it also takes part with `assistant_early_exit` at this layer; None: it does not.
        peers: name -> command of the worker of another engine.
    """

    repetitions: int = 3
    prompts: Path | None = None
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
        checkpoint = load_checkpoint(path, verify=False)
        wanted = {*choices.static_layers, *(() if choices.exit_at is None else (choices.exit_at,))}
        self._exits: ExitConfig | None = None
        if not checkpoint.exits.layers and wanted:
            self._exits = ExitConfig(tuple(sorted(wanted)), "final")
        self._path, self._settings = path, settings
        self._prompts: Prompts = (
            RandomTokens(checkpoint.config.vocab_size)
            if settings.prompts is None
            else read_prompts(settings.prompts, load_tokenizer(path))
        )
        choices = replace(choices, has_policy=checkpoint.policy is not None)
        self.experiments = quick_plan(choices) if plan == "quick" else full_plan(choices)

    def run(self, experiment: Experiment) -> Iterator[list[Measured | Note]]:
        """The results of one experiment, workload by workload."""
        with self._contestants(experiment) as (contestants, notes):
            for load in experiment.workloads:
                found = compare(experiment.name, contestants, load, self._prompts, self._settings.repetitions)
                yield [*notes, *found]
                notes.clear()
        gc.collect()  # the engines of the next experiment need the memory of these

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
            yield contestants, notes

    def _makers(self, experiment: Experiment) -> Iterator[tuple[str, Callable[[], Contestant]]]:
        path, settings, loads = self._path, self._settings, experiment.workloads
        shelf = EngineShelf(path, self._exits, loads, settings.until_eos)
        for variant in experiment.variants:
            yield variant.name, partial(shelf.contestant, variant)
        if not experiment.peers:
            return
        dtypes: dict[Dtype, None] = dict.fromkeys(variant.dtype for variant in experiment.variants)
        for dtype in dtypes:
            if settings.transformers:
                yield "transformers", partial(Transformers, path, dtype, settings.until_eos)
            if (layers := settings.assistant_layers) is not None:
                yield "transformers, drafting", partial(Transformers, path, dtype, settings.until_eos, layers)
            for name, command in settings.peers.items():
                yield name, partial(Peer, name, command, path, dtype, loads, settings.until_eos)
