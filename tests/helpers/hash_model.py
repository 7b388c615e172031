"""A language model made of hashes, without tensors: what a row computes depends on everything that it attends to.

It has layers, keys and values for each of them, early exits and every KV policy, so a wrong, stale or missing entry of
the cache changes every state after it. `solo` says what a request's answer is, without any cache to go wrong;
`HashRunner` computes iterations over cache slots as the executor does. Whatever a scheduler does, the two must agree.

A state at layer l is a hash of the state before and of the keys of all positions up to its own at l; keys at l are a
hash of the state before l. A row leaves at an early exit if the state there says so.

A request may have a source. What it says is in slots of its own, at every layer, and each row begins with all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helpers.requests import NUM_LAYERS
from offramp.serve.request.iteration_result import IterationResult, SampledToken, TokenLogprobs
from offramp.serve.request.request import Request
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest, SchedulerOutput

EXITS = (1, 3)
VOCABULARY = 4
LayerKeys = list[dict[int, int]]  # for each layer (0 is unused): cache slot -> key


def embed(token: int, position: int, source: int) -> int:
    return hash((token, position, source, 11))


def encode(token: int, position: int, layer: int) -> int:
    """What a token of a source leaves in a layer."""
    return hash((token, position, layer, 23))


def read_source(tokens: Sequence[int]) -> int:
    """What a source says as a whole."""
    return _joined([encode(token, at, layer) for at, token in enumerate(tokens) for layer in range(1, NUM_LAYERS + 1)])


def _joined(keys: Sequence[int]) -> int:
    return hash(tuple(keys)) if keys else 0


def run_layers(keys: LayerKeys, slots: Sequence[int], state: int, start: int, stop: int) -> int:
    """Run the row in the last of `slots` through layers start+1 .. stop; it attends to all of them."""
    for layer in range(start + 1, stop + 1):
        keys[layer][slots[-1]] = hash((layer, state, 13))
        state = hash((state, layer, *map(keys[layer].__getitem__, slots)))
    return state


def fill(keys: LayerKeys, slot: int, state: int, layer: int) -> None:
    for above in range(layer + 1, NUM_LAYERS + 1):
        keys[above][slot] = hash((above, state, 13))


def leaves(state: int, layer: int) -> bool:
    return hash((state, layer, 17)) % 5 < 2


def say(state: int, layer: int, exit_layer: int | None = None) -> SampledToken:
    """What a row with this state says; its confidence is the state, so that comparing it compares everything."""
    return SampledToken(hash((state, 19)) % VOCABULARY, exit_layer or layer, confidence=float(state))


def exact_keys(tokens: Sequence[int], source: Sequence[int] = ()) -> LayerKeys:
    """Keys of a full pass; slots are positions."""
    keys: LayerKeys = [{} for _ in range(NUM_LAYERS + 1)]
    for position, token in enumerate(tokens):
        run_layers(keys, range(position + 1), embed(token, position, read_source(source)), 0, NUM_LAYERS)
    return keys


def solo(request: Request) -> list[SampledToken]:
    """The answer to a request (exit layers of `verify` left out: None says nothing of drafts)."""
    policy, tokens, answer = request.exits.kv_policy, list(request.prompt_token_ids), list[SampledToken]()
    keys, source = exact_keys(tokens[:-1], request.source_token_ids), read_source(request.source_token_ids)
    num_pending = 0
    while len(answer) < request.sampling.max_tokens:
        position = len(tokens) - 1
        slots, state, depth = range(position + 1), embed(tokens[-1], position, source), 0
        said: SampledToken | None = None
        may_leave = bool(answer) and policy in ("fill", "recompute")
        if policy == "recompute" and num_pending >= request.exits.max_pending:
            may_leave = False
        stops = [request.exits.static_layer or NUM_LAYERS] if answer and policy == "static" else [*EXITS, NUM_LAYERS]
        for layer in stops:
            state = run_layers(keys, slots, state, depth, layer)
            depth = layer
            if said is None and (layer == stops[-1] or (may_leave and leaves(state, layer))):
                said = say(state, layer)
                if policy == "fill" and layer < NUM_LAYERS:
                    fill(keys, position, state, layer)
                    break
        assert said is not None
        num_pending = num_pending + 1 if said.exit_layer < NUM_LAYERS else 0
        answer.append(said)
        tokens.append(said.token_id)
        if said.token_id in request.stop_ids and len(answer) > request.sampling.min_tokens:
            break
    return answer


@dataclass
class _Kept:
    """A row that left early and waits to be completed."""

    position: int
    depth: int
    state: int


class HashRunner:
    """Computes iterations. Keeps to the contract of `SchedulerOutput` and to nothing else."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_slots = block_size * num_blocks
        self.keys: LayerKeys = [{} for _ in range(NUM_LAYERS + 1)]
        self._kept: dict[str, list[_Kept]] = {}

    def slots(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        size = self._block_size
        return [block_table[position // size] * size + position % size for position in range(num_tokens)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for offset in range(self._block_size):
                for layer in self.keys:
                    layer.pop(target * self._block_size + offset, None)
                    if source * self._block_size + offset in layer:
                        layer[target * self._block_size + offset] = layer[source * self._block_size + offset]

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def run(self, output: SchedulerOutput) -> dict[str, IterationResult]:
        for request_id in output.preempted:
            self.forget(request_id)
        self.copy(output.copies)
        for item in output.scheduled:
            if item.encodes:
                for at, (token, slot) in enumerate(zip(item.request.source_token_ids, self._source(item), strict=True)):
                    for layer in range(1, NUM_LAYERS + 1):
                        self.keys[layer][slot] = encode(token, at, layer)
        return {
            item.request.request_id: self._prefill(item) if item.phase is Phase.PREFILL else self._decode(item)
            for item in output.scheduled
        }

    def _source(self, item: ScheduledRequest) -> list[int]:
        return self.slots(item.source_table, item.request.num_source_tokens)

    def _embed(self, item: ScheduledRequest, token: int, position: int) -> int:
        keys = [self.keys[layer][slot] for slot in self._source(item) for layer in range(1, NUM_LAYERS + 1)]
        return embed(token, position, _joined(keys))

    def _prefill(self, item: ScheduledRequest) -> IterationResult:
        request, policy = item.request, item.request.exits.kv_policy
        slots = self.slots(item.block_table, item.start + item.num_tokens)
        layers = item.exit_layers or (NUM_LAYERS,) * item.num_tokens
        state, logprobs = 0, []
        for row, token in enumerate(item.token_ids):
            position = item.start + row
            state = run_layers(self.keys, slots[: position + 1], self._embed(item, token, position), 0, layers[row])
            if policy == "fill":
                fill(self.keys, slots[position], state, layers[row])
            if request.sampling.prompt_logprobs is not None and position + 1 < request.num_prompt_tokens:
                logprobs.append(TokenLogprobs(request.prompt_token_ids[position + 1], float(state)))
        tokens = (say(state, NUM_LAYERS),) if item.samples else ()
        return IterationResult(tokens, prompt_logprobs=tuple(logprobs))

    def _decode(self, item: ScheduledRequest) -> IterationResult:
        request, policy, position = item.request, item.request.exits.kv_policy, item.start
        slots = self.slots(item.block_table, position + 1)
        static = request.exits.static_layer
        kept = self._kept.setdefault(request.request_id, [])
        rows = [_Kept(position, 0, self._embed(item, item.token_ids[0], position))]
        may_leave = policy in ("fill", "recompute", "verify") and not request.runs_full_depth
        depth = 0
        for layer in [static] if static else [*EXITS, NUM_LAYERS]:
            for between in range(depth, layer):
                for row in rows:
                    row.state = run_layers(self.keys, slots[: row.position + 1], row.state, between, between + 1)
            depth = layer
            newest = rows[-1]
            if layer < NUM_LAYERS and (static or (may_leave and leaves(newest.state, layer))):
                if policy == "fill":
                    fill(self.keys, slots[position], newest.state, layer)
                if policy in ("recompute", "verify"):
                    for row in rows:
                        row.depth = layer
                    self._kept[request.request_id] = sorted([*kept, *rows], key=lambda row: row.position)
                said = say(newest.state, layer)
                return IterationResult(draft=said) if policy == "verify" else IterationResult((said,))
            joining = [row for row in kept if row.depth == layer]
            kept = [row for row in kept if row.depth != layer]
            rows = sorted([*joining, *rows], key=lambda row: row.position)
        assert not kept, "a complete pass takes everybody along"
        self._kept[request.request_id] = []
        if policy != "verify":
            return IterationResult((say(rows[-1].state, NUM_LAYERS),))
        return IterationResult(tuple(self._judge(request, rows)))

    def _judge(self, request: Request, rows: Sequence[_Kept]) -> list[SampledToken]:
        """`verify`: drafts up to the first that the full model would not have said, and its own token there."""
        assert len(rows) == len(request.drafts) + 1
        judged: list[SampledToken] = []
        for row, draft in zip(rows, [*request.drafts, None], strict=True):
            accepted = draft is not None and draft.token_id == say(row.state, NUM_LAYERS).token_id
            judged.append(say(row.state, NUM_LAYERS, draft.exit_layer if draft is not None and accepted else None))
            if not accepted:
                break
        return judged
