"""Batch-synchronised early exit, restated slowly: the oracle of the sync policy `all`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.engines import MAX_MODEL_LEN, Job
from offramp.common.exits.confidence import confidence
from offramp.common.families import AnyModel
from offramp.common.model.attention import Layout
from offramp.common.model.transformer import MultiExitTransformer


def algorithm_1(model: AnyModel, jobs: Sequence[Job]) -> list[tuple[list[int], list[int]]]:
    """The whole model over every text for every token.

    Prompts run at full depth together, and then one token of each sequence per pass. Sequences without a policy are no
    part of the status, and run on.
    """
    decoder: Any = model
    num_layers = model.config.num_layers
    beginnings, lay_outs = zip(*(_read(model, job) for job in jobs), strict=True)
    texts = [list(beginning) for beginning in beginnings]
    depths = [[num_layers] * len(beginning) for beginning in beginnings]
    said: list[tuple[list[int], list[int]]] = [([], []) for _ in jobs]
    for step in range(jobs[0].max_tokens):
        states = []
        for text, depth, lay_out in zip(texts, depths, lay_outs, strict=True):
            layout = lay_out(torch.tensor([text]), torch.tensor([depth]))
            h = model.embed(torch.tensor([text]))
            by_layer = [h]
            for layer in range(num_layers):
                h = decoder.run_layers(h, layer, layer + 1, layout)
                by_layer.append(h)
            states.append((by_layer, layout))
        status = [job.policy is None for job in jobs]
        output_layer = num_layers
        for layer in range(1, num_layers):
            for index, job in enumerate(jobs):
                if job.policy is None or layer not in job.policy.thresholds:
                    continue
                by_layer, layout = states[index]
                logits = decoder.exit_logits(by_layer[layer], layer, layout)[0, -1:]
                sure = confidence(job.policy.measure, logits, by_layer[layer][0, -1:], by_layer[layer - 1][0, -1:])
                status[index] |= float(sure) > job.policy.threshold(layer, step, job.max_tokens)
            if all(status) and step > 0:
                output_layer = layer
                break
        for index, job in enumerate(jobs):
            layer = num_layers if job.policy is None else output_layer
            by_layer, layout = states[index]
            token = int(decoder.exit_logits(by_layer[layer], layer, layout)[0, -1].argmax())
            depths[index][-1] = layer
            texts[index].append(token)
            depths[index].append(num_layers)
            said[index][0].append(token)
            said[index][1].append(layer)
    return said


def _read(model: AnyModel, job: Job) -> tuple[tuple[int, ...], Callable[[Tensor, Tensor], Any]]:
    """What the decoder begins with, and the layout of its text with frozen depths."""
    if isinstance(model, MultiExitTransformer):
        config = model.config
        return job.prompt, lambda ids, depths: Layout.build(config, ids, None, depths, MAX_MODEL_LEN)
    encoded = model.encode(torch.tensor([job.prompt]))
    start = (model.config.decoder_start_token_id,)
    return start, lambda ids, depths: model.layout(encoded, ids, exit_depths=depths)
