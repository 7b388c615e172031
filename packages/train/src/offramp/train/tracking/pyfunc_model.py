"""The registered model as MLflow sees it: prompts in, texts out.

MLflow keeps this file beside the checkpoint directory and runs it to load the model ("models from code"), so nothing is
pickled. It is the reference, not the server: one prompt at a time, no cache. `offramp serve` is for traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

DEFAULT_MAX_NEW_TOKENS = 32


class OfframpModel(PythonModel):
    """Generates greedily with the checkpoint's own exit policy."""

    def load_context(self, context: PythonModelContext) -> None:
        """Loads model and tokenizer from the artifact `checkpoint`."""
        from offramp.common.checkpoint import load_checkpoint
        from offramp.common.tokenizer import load_tokenizer

        path = context.artifacts["checkpoint"]
        self.checkpoint = load_checkpoint(path)
        self.tokenizer = load_tokenizer(path)

    # The base class has an empty body, from which type checkers conclude that it returns nothing.
    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """The texts that continue the prompts.

        Args:
            context: unused, see `load_context`.
            model_input: a list or series of prompts, or a data frame with the prompts in the column `prompt`, or in its
                first column.
            params: `max_new_tokens`; `full_depth` runs every layer for every token.
        """
        from offramp.common.generation import generate

        settings = params or {}
        policy = None if settings.get("full_depth") else self.checkpoint.policy
        texts: list[str] = []
        for prompt in _prompts(model_input):
            made = generate(
                self.checkpoint.model,
                list(self.tokenizer(prompt)["input_ids"]),
                int(settings.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)),
                policy=policy,
                eos_ids=self.checkpoint.eos_token_ids,
            )
            texts.append(str(self.tokenizer.decode(made.token_ids, skip_special_tokens=True)))
        return texts


def _prompts(model_input: Any) -> Iterable[str]:
    if isinstance(model_input, pd.DataFrame):
        model_input = model_input["prompt"] if "prompt" in model_input.columns else model_input.iloc[:, 0]
    return [model_input] if isinstance(model_input, str) else [str(prompt) for prompt in model_input]


mlflow.models.set_model(OfframpModel())
