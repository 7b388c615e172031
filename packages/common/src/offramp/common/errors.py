"""The one exception that stands for a fault the user can mend."""

from __future__ import annotations


class OfframpError(Exception):
    """A fault in what the user gave us, said in one sentence with the value, the limit and the remedy.

    The command line prints it as ``offramp: error: <sentence>`` and exits with code 1; a programming error is any
    other exception and keeps its traceback.
    """
