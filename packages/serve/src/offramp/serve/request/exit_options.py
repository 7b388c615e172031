"""How deep the tokens of one request run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.number_checks import check_whole


@dataclass(frozen=True)
class ExitOptions:
    """How deep the tokens of one request run.

    Attributes:
        kv_policy: see `KVPolicy`; `full` is the way to ask for no early exit.
        policy: thresholds in place of the checkpoint's own; None takes the checkpoint's. Without either, every token
            runs all layers.
        max_pending: `recompute` and `verify`: a pass that finds this many incomplete tokens runs all layers.
        static_layer: `static`: the exit at which every generated token leaves.
    """

    kv_policy: KVPolicy = "fill"
    policy: ExitPolicy | None = None
    max_pending: int = 8
    static_layer: int | None = None

    def __post_init__(self) -> None:
        if self.kv_policy not in get_args(KVPolicy):
            raise OfframpError(
                f"KV policy {self.kv_policy!r} is unknown; choose one of {', '.join(get_args(KVPolicy))}."
            )
        if self.kv_policy == "full" and self.policy is not None:
            raise OfframpError("KV policy 'full' never exits, so it takes no exit policy; leave one of them out.")
        if self.kv_policy == "static" and self.policy is not None:
            raise OfframpError("KV policy 'static' asks no confidence, so it takes no exit policy; leave it out.")
        if (self.kv_policy == "static") != (self.static_layer is not None):
            raise OfframpError("KV policy 'static' and static_layer belong together; give both or neither.")
        check_whole("max_pending", self.max_pending, low=1)
