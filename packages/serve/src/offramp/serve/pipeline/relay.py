"""What a later stage does with a message, however it has come."""

from __future__ import annotations

from collections.abc import Callable

from offramp.serve.pipeline.messages import (
    Kind,
    Message,
    answer_message,
    decode,
    encode,
    plan_message,
    plan_of,
    rule_of,
)
from offramp.serve.pipeline.stage import Stage


def relay(stage: Stage, data: bytes, to_first: Callable[[bytes], None], onward: Callable[[bytes], None] | None) -> None:
    """Take in one message.

    Args:
        stage: that it has come to.
        data: the message.
        to_first: sends a message to the first stage.
        onward: sends one to the next stage; None: there is none.
    """
    message = decode(data)
    if message.kind is Kind.RULE:
        stage.learn(message.number, rule_of(message))
        if onward is not None:
            onward(data)
        return
    assert message.kind is Kind.PLAN, message.kind
    plan, x = plan_of(message, stage.model.dtype)
    plan, x = stage.run(plan, x, lambda departures: to_first(encode(answer_message(message.number, departures))))
    if onward is not None:
        onward(encode(plan_message(plan, x)))
    else:
        to_first(encode(Message(Kind.DONE, message.number)))
