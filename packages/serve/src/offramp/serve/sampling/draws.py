"""Random numbers without a state: each is a function of who asks, for which token, and what for.

A request's draws are therefore the same alone and among others, after a preemption, whatever was drafted and thrown
away, and in whatever chunks its prompt ran. The function is Philox4x64-10 (Salmon et al., SC 2011), whose key is the
request and whose counter is the token.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np

_WORD = 2**64


class Purpose(IntEnum):
    """What a number is drawn for; numbers for different purposes are independent."""

    TOKEN = 0
    """To choose a token, a draft's too."""
    ACCEPT = 1
    """To decide whether a draft stays."""
    RESIDUAL = 2
    """To choose the token in place of a draft that does not."""


def fresh_seed() -> int:
    """A seed that nobody else has, for a request that gives none."""
    return secrets.randbits(63)


def uniform(seed: int, sequence: int, index: int, purpose: Purpose) -> float:
    """A number in [0, 1), a multiple of 2^-53.

    Args:
        seed: of the request, in -2^63 .. 2^63 - 1.
        sequence: which of the sequences asked for with this seed, at least 0.
        index: which token of the output, from 0.
        purpose: what it is drawn for.
    """
    key = np.array((seed % _WORD, sequence), dtype=np.uint64)
    counter = np.array((index, purpose, 0, 0), dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53
