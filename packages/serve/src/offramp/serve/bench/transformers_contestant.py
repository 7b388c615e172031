"""`generate` of transformers as a contestant."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from offramp.common.checkpoint import DTYPES
from offramp.common.errors import OfframpError
from offramp.serve.bench.contestants import Identity
from offramp.serve.bench.trial import Question, Trial
from offramp.serve.config import Dtype


class Transformers:
    """`generate` of transformers in this process; optionally speculating with its own first layers.

    Attributes:
        who: see `Identity`.
    """

    def __init__(self, path: Path, dtype: Dtype, assistant_layers: int | None = None) -> None:
        """Load.

        Args:
            path: of the checkpoint; its early exits are not used.
            dtype: of weights.
            assistant_layers: draft with this many layers (`assistant_early_exit`), one sequence at a time.

        Raises:
            OfframpError: the model cannot draft with its own layers.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
        from transformers.utils import logging

        # It warns of what it does itself with the options of `generate`, in every call.
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._has_encoder = bool(AutoConfig.from_pretrained(str(path), local_files_only=True).is_encoder_decoder)
        if self._has_encoder and assistant_layers is not None:
            raise OfframpError("assistant_early_exit of transformers is made for decoder-only models.")
        kind = AutoModelForSeq2SeqLM if self._has_encoder else AutoModelForCausalLM
        loaded: Any = kind.from_pretrained(str(path), dtype=DTYPES[dtype], local_files_only=True)
        self._model: Any = loaded.eval()
        self._assistant_layers = assistant_layers
        drafts = "" if assistant_layers is None else f", drafts at {assistant_layers}"
        self.who = Identity(
            f"transformers{drafts}", dtype, max_batch=None if assistant_layers is None else 1, closed_loop=False
        )

    def run(self, question: Question) -> Trial:
        """See `Contestant`; every sequence runs at full depth."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        prompts, new_tokens = question.prompts, question.new_tokens
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # What `generate` gives back before the new tokens: the prompt, or what the decoder reads first.
        known = 1 if self._has_encoder else longest
        steps: list[tuple[float, int]] = []

        class Clock(StoppingCriteria):
            """Notes how many tokens there are when, and stops nobody."""

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                steps.append((time.perf_counter() - start, input_ids.shape[1] - known))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        options: dict[str, Any] = {} if question.until_eos else {"min_new_tokens": new_tokens}
        if self._assistant_layers is not None:
            options["assistant_early_exit"] = self._assistant_layers
        start = time.perf_counter()
        with torch.inference_mode():
            answer = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Clock()]),
                **options,
            )
        times: list[float] = []
        for moment, count in steps:
            times += [moment] * (count - len(times))
        answers: list[list[int]] = [row[known:].tolist() for row in answer]
        return Trial([times[: self._length(tokens, question.until_eos)] for tokens in answers])

    def close(self) -> None:
        """See `Contestant`."""
        del self._model

    def _length(self, tokens: list[int], until_eos: bool) -> int:
        """Tokens up to the first that ends a sequence, which counts."""
        if not until_eos:
            return len(tokens)
        ends = self._model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        return next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))
