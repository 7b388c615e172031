"""Which layers of a model carry an exit, and what their heads look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from offramp.common.errors import OfframpError

HeadKind = Literal["bare", "final", "norm", "adapter", "mlp", "block"]


@dataclass(frozen=True)
class ExitConfig:
    """The early exits of a model. The final exit always exists and is not listed.

    Attributes:
        layers: exit layers, ascending: the number of blocks run before each exit.
        head: what comes before the unembedding:
            `bare` nothing; `final` the model's own final norm (LayerSkip); `norm` a norm; `adapter` a residual linear
            map or small MLP, then a norm; `mlp` a residual feed-forward, then a norm (EE-LLM's exit MLP); `block` a
            whole Transformer block, then a norm (EE-LLM's exit block).
        tied: exits share the model's unembedding; otherwise each has its own.
        adapter_dim: width of the adapter's hidden layer; None is a single linear map.
        classifier: every exit has a classifier of its own that tells from the state after the exit layer whether what
            the exit says will do; the confidence measure `classifier`. Another part than the head, trained later.
    """

    layers: tuple[int, ...] = ()
    head: HeadKind = "norm"
    tied: bool = True
    adapter_dim: int | None = None
    classifier: bool = False

    def __post_init__(self) -> None:
        if self.head not in get_args(HeadKind):
            raise OfframpError(f"exit head {self.head!r} is unknown; choose one of {', '.join(get_args(HeadKind))}.")
        if self.head == "final" and not self.tied:
            raise OfframpError("exit head 'final' shares the model's norm and unembedding, so it cannot be untied.")
        if self.adapter_dim is not None and (self.head != "adapter" or self.adapter_dim < 1):
            raise OfframpError(f"adapter_dim {self.adapter_dim} needs exit head 'adapter' and must be at least 1.")
        if not isinstance(self.classifier, bool):
            raise OfframpError(f"classifier {self.classifier!r} must be true or false.")
        if list(self.layers) != sorted(set(self.layers)):
            raise OfframpError(f"exit layers {list(self.layers)} must be ascending and without duplicates.")

    def describe(self) -> str:
        """Its kind in words, whatever the layers."""
        width = "" if self.adapter_dim is None else f" of width {self.adapter_dim}"
        classifier = ", with classifiers" if self.classifier else ""
        return f"{self.head}{width}, {'tied' if self.tied else 'untied'}{classifier}"

    def check(self, num_layers: int) -> None:
        """Raise `OfframpError` unless every exit layer lies inside a model of `num_layers` layers."""
        wrong = [layer for layer in self.layers if not 1 <= layer < num_layers]
        if wrong:
            raise OfframpError(
                f"exit layers {wrong} are outside 1..{num_layers - 1}: layers are counted from 1, and layer "
                f"{num_layers} is the final exit, which always exists."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `exits.json`."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExitConfig:
        """Inverse of `to_json`; an unknown field is an error."""
        try:
            return cls(**{**data, "layers": tuple(int(layer) for layer in data["layers"])})
        except (TypeError, KeyError, ValueError) as fault:
            raise OfframpError(f"exits.json: the section 'exits' is not understood: {fault}.") from None
