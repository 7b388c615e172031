"""A user's fault that all ranks meet is said by one of them; one that a single rank meets is said by that rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed
from lightning.pytorch.utilities import rank_zero_only

from offramp.common.errors import OfframpError
from offramp.train.lost_process import LostProcess

PATIENCE_S = 5.0
"""How long a rank waits for word from rank 0 that it has met a fault too."""
_KEY = "offramp/fault"


@contextmanager
def one_voice() -> Iterator[None]:
    """Around what ranks do together: rank 0 raises its `OfframpError`; the others leave quietly if it has one."""
    try:
        yield
    except OfframpError as fault:
        if this_rank() == 0:
            _say_so()
        elif _rank_zero_said_so(gone=not isinstance(fault, LostProcess)):
            raise SystemExit(1) from fault
        raise


def this_rank() -> int:
    """This process's rank as far as it is known: from its launcher, then from the process group."""
    return int(getattr(rank_zero_only, "rank"))  # noqa: B009 - an attribute of a function


def _say_so() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._get_default_store().set(_KEY, "said")


def _rank_zero_said_so(*, gone: bool) -> bool:
    """Whether rank 0 has met a fault. Before ranks know each other, a launcher ends the others when one fails.

    Args:
        gone: what it means that rank 0 is no longer there. It is no word where that is the fault itself.
    """
    answers: list[bool] = []
    # The store of a node that has vanished says neither yes nor no, for as long as TCP hopes.
    asking = threading.Thread(target=lambda: answers.append(_ask(gone)), daemon=True)
    asking.start()
    asking.join(PATIENCE_S + 2.0)
    return any(answers)


def _ask(gone: bool) -> bool:
    store = torch.distributed.distributed_c10d._get_default_store() if torch.distributed.is_initialized() else None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if store is not None and store.check([_KEY]):
                # Launchers kill what is left when one process fails, and rank 0 must have had its say.
                time.sleep(1.0)
                return True
        except RuntimeError:  # the store went with rank 0
            return gone
        time.sleep(0.1)
    return False
