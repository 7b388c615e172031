"""What a server says to whoever has started it."""

from __future__ import annotations

import shlex

from offramp.serve.http.settings import DoorSettings
from offramp.serve.protocol.replies import encode


def how_to_ask(url: str, settings: DoorSettings, model: str, *, metrics: bool = False) -> None:
    """Prints how a client asks a server that has just started, and whether it has metrics."""
    example = encode({"model": model, "prompt": "Once upon a time", "max_tokens": 32}).decode()
    told = f"metrics: {url}/metrics\n" if metrics else ""
    key = "" if settings.keys is None else " -H 'authorization: Bearer KEY'"
    print(
        f"\ncurl {url}/v1/completions -H 'content-type: application/json'{key} -d {shlex.quote(example)}\n\n"
        f'client = openai.OpenAI(base_url="{url}/v1", api_key="{"none" if settings.keys is None else "KEY"}")\n\n'
        f"{told}Stop with Ctrl-C.",
        flush=True,
    )
