"""A real model: SmolLM2-135M-Instruct, as its package carries it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from offramp.common.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

TEXT = """The lighthouse of Alexandria was built in the third century BC, during the reign of Ptolemy II. It stood at
least 100 metres high, which made it one of the tallest structures made by people for many centuries. Three earthquakes
between 956 and 1323 damaged it badly, and its last stones were used in 1480 to build a fort on the same island.
"""


@torch.no_grad()
def test_it_equals_transformers_and_reads_english(smollm2: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(smollm2)
    ours = load_checkpoint(smollm2)
    ids = torch.tensor([AutoTokenizer.from_pretrained(smollm2).encode(TEXT)])
    expected = theirs(ids, output_hidden_states=True)
    out = ours.model(ids)
    torch.testing.assert_close(out.logits[30], expected.logits, rtol=1e-5, atol=1e-5)
    layout, h = ours.model.layout(ids), ours.model.embed(ids)
    for layer in range(1, 30):
        h = ours.model.run_layers(h, layer - 1, layer, layout)
        torch.testing.assert_close(h, expected.hidden_states[layer], rtol=1e-5, atol=1e-5)
    # A wrong order of channels, a lost norm or another cut of the text costs several nats at once.
    loss = F.cross_entropy(out.logits[30][0, :-1], ids[0, 1:])
    assert 1.5 < loss < 3.5, loss


def test_the_tokenizer_cuts_digits_and_knows_the_chat(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 1480,")] == ["in", " ", "1", "4", "8", "0", ","]
    for text in (TEXT, "naïve  café\n\n\tΔ=3.14 🙂", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert chat[0] == 1
    assert tokenizer.decode(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)
    assert load_checkpoint(smollm2).eos_token_ids == (2,)


def test_it_says_that_it_is_dequantised(smollm2: Path) -> None:
    provenance = load_checkpoint(smollm2).provenance
    assert provenance["dequantised"] is True
    assert provenance["gguf_tensor_types"] == ["F32", "Q4_1", "Q8_0"]
    assert provenance["gguf_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
