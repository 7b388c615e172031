"""KV policies: where the keys and values of skipped layers come from, as small rules on rows.

Upper layers of later tokens attend to a token that left early, so the slots it skipped must hold something by then. A
policy says which exits a request's rows may take or must take, what happens when they leave, and whether they come back
in a later pass. The loop over segments is the executor's, and the same for all.

Legend: N rows that leave, D model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.execution.kept_tokens import KeptTokens
from offramp.serve.execution.stored_states import StoredStates
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest


class LeaveRule(Protocol):
    """What happens to rows that leave."""

    def __call__(self, layer: int, x: Tensor, positions: Sequence[int], owners: Iterable[str]) -> None:
        """Deal with rows that leave.

        Args:
            layer: exit layer.
            x: [N, D] their states after it.
            positions: N, in their sequences.
            owners: N, the ids of their requests; rows of one are in order of position.
        """
        ...


class Keep:
    """`fill`, `recompute`, `verify`: the states are kept until a pass of the same sequence goes deeper.

    Only then does anybody look at what lies above. Under `recompute` and `verify` that pass takes the tokens along.
    EE-LLM (Chen et al. 2024, section 4) runs such tokens again from the first layer; here they go on where they
    stopped. Under `fill` it first makes their keys and values from the states.
    """

    def __init__(self, kept: KeptTokens, states: StoredStates) -> None:
        self._kept, self._states = kept, states

    def __call__(self, layer: int, x: Tensor, positions: Sequence[int], owners: Iterable[str]) -> None:
        """Put the rows away."""
        for owner, position, slot in zip(owners, positions, self._states.put(x), strict=True):
            self._kept.keep(owner, layer, position, slot)


def abandon(layer: int, x: Tensor, positions: Sequence[int], owners: Iterable[str]) -> None:
    """`static`: every later row leaves at the same exit, so nothing above it is ever read."""


def leave_rules(kept: KeptTokens, states: StoredStates) -> Mapping[KVPolicy, LeaveRule]:
    """The rule of every policy whose rows may leave."""
    keep = Keep(kept, states)
    return {"fill": keep, "recompute": keep, "verify": keep, "static": abandon}


def exit_policy(options: ExitOptions, default: ExitPolicy | None) -> ExitPolicy | None:
    """The exits that a request may take where it is sure: its own policy, else the checkpoint's; None: no exit.

    Drafts are judged by the full model, so under `verify` they are taken from the shortlist alone.
    """
    if options.kv_policy in ("full", "static"):
        return None
    policy = default if options.policy is None else options.policy
    if policy is not None and policy.shortlist is not None and options.kv_policy == "verify":
        return replace(policy, shortlist_only=True)
    return policy


def check_exits(options: ExitOptions, default: ExitPolicy | None, exits: ExitConfig, vocab_size: int) -> None:
    """Raise `OfframpError` if a request asks for exits that a model does not have.

    Args:
        options: of the request.
        default: the checkpoint's policy.
        exits: what the model has.
        vocab_size: V.
    """
    static = options.static_layer
    if static is not None and static not in exits.layers:
        raise OfframpError(f"static_layer {static} is no exit of this model; its exits are at {list(exits.layers)}.")
    policy = exit_policy(options, default)
    if policy is not None:
        policy.check(exits.layers, vocab_size)
        policy.check_measure(has_classifiers=exits.classifier)


def bound_layers(item: ScheduledRequest) -> Sequence[int] | None:
    """For each row the layer at which it leaves whatever it is sure of; None if that is the last one for all rows."""
    if item.exit_layers is not None:
        return item.exit_layers
    static = item.request.exits.static_layer
    if static is not None and item.phase is Phase.DECODE:
        return (static,) * item.num_tokens
    return None


def carries_on(request: Request) -> bool:
    """Whether tokens that left early come back in later passes."""
    return request.exits.kv_policy in ("recompute", "verify")


def keeps(request: Request) -> bool:
    """Whether states of tokens that left early are kept."""
    return request.exits.kv_policy == "fill" or carries_on(request)
