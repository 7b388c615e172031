"""A process of the same run that has ended or does not answer, told from the libraries' words for it."""

from __future__ import annotations

from torch.distributed import DistError, DistNetworkError, DistStoreError

from offramp.common.errors import OfframpError

_TAKEN = ("failed to listen", "failed to bind", "eaddrinuse", "address already in use")
_SLOW = ("timed out", "timeout")
_ENDED = ("connection closed", "connection reset", "broken pipe", "connection refused", "remote process exited")


class LostProcess(OfframpError):
    """Another process of the run ended, or did not answer."""


def timed_out(fault: BaseException) -> bool:
    """Whether another process did not answer in time; torch has no type for it."""
    return isinstance(fault, RuntimeError) and any(word in str(fault).lower() for word in _SLOW)


def ended(fault: BaseException) -> bool:
    """Whether another process went while this one was talking to it; torch has no type for it."""
    return isinstance(fault, RuntimeError) and any(word in str(fault).lower() for word in _ENDED)


def lost_process(fault: BaseException, rank: int, *, alone: bool) -> OfframpError | None:
    """The sentence for a fault that comes from another process, met outside of what the pipeline watches itself.

    Args:
        fault: anything.
        rank: of this process.
        alone: it is in touch with no other, so that only meeting them can fail.
    """
    if alone and not isinstance(fault, DistError):
        return None
    if isinstance(fault, DistNetworkError) and any(word in str(fault).lower() for word in _TAKEN):
        return OfframpError(
            f"rank {rank} cannot let the others meet it: {_first_line(fault)}; another program has that port, choose "
            "another MASTER_PORT (--master-port) on all nodes."
        )
    if isinstance(fault, DistStoreError | DistNetworkError) and not ended(fault):
        return LostProcess(
            f"rank {rank} waited in vain for all processes to come: {_first_line(fault)}; see whether every node was "
            "started, and whether they reach the first one at its address and port."
        )
    if timed_out(fault):
        return LostProcess(
            f"rank {rank} waited in vain for another process: {_first_line(fault)}; see what that process is doing, "
            "or give it more time (timeout_minutes of deepspeed_pipeline), and go on with --ckpt_path=last."
        )
    if ended(fault):
        return LostProcess(
            f"rank {rank} was in touch with another process when it ended; the message of that process says why, and "
            "--ckpt_path=last goes on."
        )
    return None


def _first_line(fault: BaseException) -> str:
    line = str(fault).strip().partition("\n")[0]
    return line.rpartition("] ")[2].rstrip(".") or type(fault).__name__
