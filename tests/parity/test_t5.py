"""The encoder-decoder model is the one transformers runs: same logits, same exits, same text, same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from helpers.tiny_t5 import EOS_ID, SHAPES, hugging_face_t5, load_t5, t5_directory, token_ids
from offramp.common.checkpoint import CheckpointOf, load_any_checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import generate
from offramp.common.importing import NewExits, import_model
from offramp.common.t5.attention import relative_buckets
from offramp.common.t5.layout import KeyValueCache
from offramp.common.t5.model import MultiExitT5

ROWS, SOURCE, TARGET = 3, 19, 12


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest number: logits of these models reach 20, and fp32 has seven digits."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.fixture(scope="module", params=SHAPES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, CheckpointOf[MultiExitT5]]:
    """The same weights in transformers and in Offramp."""
    directory = tmp_path_factory.mktemp("t5")
    return hugging_face_t5(directory, **SHAPES[request.param]), load_t5(directory)


def sources() -> tuple[Tensor, Tensor]:
    """Tokens [B, M] and their mask: whole, padded on the right, padded on the left."""
    mask = torch.ones(ROWS, SOURCE, dtype=torch.long)
    mask[1, 11:] = 0
    mask[2, :6] = 0
    return token_ids(ROWS, SOURCE) * mask, mask


@torch.no_grad()
def test_logits_and_states_equal_transformers(
    family: tuple[Any, CheckpointOf[MultiExitT5]],
) -> None:
    theirs, ours = family
    (source, mask), target = sources(), token_ids(ROWS, TARGET, 5)
    expected: Any = theirs(source, attention_mask=mask, decoder_input_ids=target, output_hidden_states=True)
    assert expected.logits.std() > 0.3
    encoded = ours.model.encode(source, mask)
    seen = mask[..., None].bool()
    assert_equal(encoded.states * seen, expected.encoder_last_hidden_state * seen)
    layout, h = ours.model.layout(encoded, target), ours.model.embed(target)
    last = ours.config.num_layers
    for layer in range(1, last):
        h = ours.model.run_layers(h, layer - 1, layer, layout)
        assert_equal(h, expected.decoder_hidden_states[layer])
    h = ours.model.run_layers(h, last - 1, last, layout)
    assert_equal(ours.model.exit_logits(h, last), expected.logits)
    assert_equal(ours.model(source, target, mask, exits=[last]).logits[last], expected.logits)


def test_gradients_equal_transformers(family: tuple[Any, CheckpointOf[MultiExitT5]]) -> None:
    """The relative bias, which all layers share through a mask, is where one could be lost."""
    theirs, ours = family
    (source, mask), target = sources(), token_ids(ROWS, TARGET, 5)
    weights = torch.randn(ROWS, TARGET, ours.config.vocab_size, generator=torch.Generator().manual_seed(1))
    last = ours.config.num_layers
    loss: Any = (theirs(source, attention_mask=mask, decoder_input_ids=target).logits * weights).mean()
    loss.backward()
    (ours.model(source, target, mask, exits=[last]).logits[last] * weights).mean().backward()
    place = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    pairs = [
        (ours.model.relative_attention_bias.weight, theirs.decoder.get_parameter(place)),
        (ours.model.encoder.relative_attention_bias.weight, theirs.encoder.get_parameter(place)),
    ]
    for own, their_bias in pairs:
        assert own.grad is not None
        assert their_bias.grad is not None
        assert own.grad.abs().max() > 1e-6
        assert (own.grad - their_bias.grad).norm() < 1e-5 * their_bias.grad.norm()
    embedding, their_embedding = ours.model.embed_tokens.weight.grad, theirs.shared.weight.grad
    assert embedding is not None
    assert (embedding - their_embedding).norm() < 1e-5 * their_embedding.norm()
    theirs.zero_grad()
    ours.model.zero_grad()


@torch.no_grad()
def test_steps_with_caches_equal_the_whole_pass(
    family: tuple[Any, CheckpointOf[MultiExitT5]],
) -> None:
    model, last = family[1].model, family[1].config.num_layers
    (source, mask), target = sources(), token_ids(ROWS, TARGET, 5)
    encoded = model.encode(source, mask)
    whole = model.run_layers(model.embed(target), 0, last, model.layout(encoded, target))
    cache, steps = KeyValueCache(), []
    for piece in target.split([1, 1, 4, 1, 5], dim=1):
        layout = model.layout(encoded, piece, cache=cache)
        steps.append(model.run_layers(model.embed(piece), 0, last, layout))
    assert cache.num_tokens == TARGET
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))


@torch.no_grad()
def test_cached_fill_equals_frozen_depths(family: tuple[Any, CheckpointOf[MultiExitT5]]) -> None:
    """A token that leaves early fills the caches above with keys and values of its frozen state."""
    model, last = family[1].model, family[1].config.num_layers
    source, target = token_ids(1, SOURCE), token_ids(1, 8, 5)
    depths = torch.tensor([[last, 1, last, 1, 1, last, 1, last]])
    encoded = model.encode(source)
    whole = model.run_layers(model.embed(target), 0, last, model.layout(encoded, target, exit_depths=depths))
    cache, steps = KeyValueCache(), []
    for piece, depth in zip(target.split(1, dim=1), depths.split(1, dim=1), strict=True):
        layout = model.layout(encoded, piece, exit_depths=depth, cache=cache)
        steps.append(model.run_layers(model.embed(piece), 0, last, layout))
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))
    if last == 2:
        return  # what one layer sees of a state frozen below it is the state
    exact = model.run_layers(model.embed(target), 0, last, model.layout(encoded, target))
    assert (exact[:, -1] - whole[:, -1]).abs().max() > 1e-3  # and that is not what full depth gives


@torch.no_grad()
def test_packed_pairs_equal_pairs_alone(family: tuple[Any, CheckpointOf[MultiExitT5]]) -> None:
    model, last = family[1].model, family[1].config.num_layers
    pairs = [(token_ids(1, 7, 1), token_ids(1, 4, 2)), (token_ids(1, 9, 3), token_ids(1, 6, 4))]
    source = torch.cat([*(s for s, _ in pairs), torch.zeros(1, 3, dtype=torch.long)], dim=1)
    target = torch.cat([*(t for _, t in pairs), torch.zeros(1, 2, dtype=torch.long)], dim=1)
    source_segments = torch.tensor([[1] * 7 + [2] * 9 + [0] * 3])
    target_segments = torch.tensor([[1] * 4 + [2] * 6 + [0] * 2])
    for segments in (source_segments, source_segments[:, :16]):  # padding of the target with and without any to see
        packed = model(source[:, : segments.shape[1]], target, segments, target_segments, exits=[last]).logits[last]
        assert packed.isfinite().all()
        alone = torch.cat([model(s, t, exits=[last]).logits[last] for s, t in pairs], dim=1)
        assert_equal(packed[:, :10], alone)


@pytest.mark.parametrize("shape", ["t5, deep decoder", "v1.1"])
@pytest.mark.parametrize("head", ["final", "bare", "norm", "adapter"])
@torch.no_grad()
def test_exits_equal_heads_on_the_states_of_transformers(tmp_path: Path, shape: str, head: Any) -> None:
    theirs = hugging_face_t5(tmp_path / "hf", **SHAPES[shape])
    exits = ExitConfig((1, 3), head)
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(exits, norm_scale=0.5))
    ours = load_t5(tmp_path / "out")
    (source, mask), target = sources(), token_ids(ROWS, TARGET, 5)
    states: Any = theirs(source, attention_mask=mask, decoder_input_ids=target, output_hidden_states=True)
    norm = theirs.decoder.final_layer_norm
    scale = 32**-0.5 if shape.startswith("t5") else 1.0
    got = ours.model(source, target, mask)
    for layer in exits.layers:
        # An adapter starts as the identity, and so is no more than its norm, which starts as half the final one.
        factor = {"final": 1.0, "bare": 1.0}.get(head, 0.5)
        state = states.decoder_hidden_states[layer]
        state = state if head == "bare" else norm(state) * factor
        assert_equal(got.logits[layer], theirs.lm_head(state * scale))


@torch.no_grad()
def test_an_exit_with_an_unembedding_of_its_own_has_no_scale(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf")
    import_model(str(tmp_path / "hf"), tmp_path / "tied", exits=NewExits(ExitConfig((2,), "norm")))
    import_model(str(tmp_path / "hf"), tmp_path / "own", exits=NewExits(ExitConfig((2,), "norm", tied=False)))
    tied, own = load_t5(tmp_path / "tied").model, load_t5(tmp_path / "own").model
    state = torch.randn(2, 32)
    torch.testing.assert_close(own.exit_state(state, 2), own.exits.get_submodule("2.norm")(state), rtol=0, atol=0)
    torch.testing.assert_close(own.exit_logits(state, 2), tied.exit_logits(state, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 3), (6, 9), (7, 20), (64, 512)])
@pytest.mark.parametrize("both_ways", [True, False])
def test_classes_of_distances_are_those_of_transformers(num_buckets: int, max_distance: int, both_ways: bool) -> None:
    distances = torch.arange(-700, 700)
    expected = T5Attention._relative_position_bucket(distances, both_ways, num_buckets, max_distance)
    assert torch.equal(relative_buckets(distances, num_buckets, max_distance, both_ways), expected)


@torch.no_grad()
def test_greedy_text_equals_that_of_transformers(
    family: tuple[Any, CheckpointOf[MultiExitT5]],
) -> None:
    theirs, ours = family
    length, ended = 14, 0
    # Its cache has as many layers as the encoder, so with a deeper decoder it fails.
    use_cache = ours.config.num_layers <= ours.config.num_encoder_layers
    for seed in range(4):
        source = token_ids(1, 4 + 5 * seed, seed)
        # Some token that the text meets ends it, so that ends are met.
        free = generate(ours.model, source[0].tolist(), length).token_ids
        for eos in (EOS_ID, free[5]):
            text: Any = theirs.generate(
                source,
                attention_mask=torch.ones_like(source),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=eos,
                use_cache=use_cache,
            )
            got = generate(ours.model, source[0].tolist(), length, eos_ids=[eos]).token_ids
            assert got == text[0, 1:].tolist()
            ended += got[-1] == eos
    assert ended >= 4


@torch.no_grad()
def test_policies_mean_the_same_as_for_decoder_only_models(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES["v1.1"])
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((1, 3), "final")))
    model = load_t5(tmp_path / "out").model
    policy = ExitPolicy("max_probability", {1: 0.6, 3: 0.6})
    source = token_ids(1, 9)[0].tolist()
    full = generate(model, source, 16)
    assert set(full.exit_layers) == {4}
    fill = generate(model, source, 16, policy=policy)
    assert fill.exit_layers[0] == 4  # the token that the decoder starts with is its prompt
    assert len(set(fill.exit_layers)) > 1
    recompute = generate(model, source, 16, kv_policy="recompute", policy=policy)
    assert recompute.token_ids != full.token_ids
    verified = generate(model, source, 16, kv_policy="verify", policy=policy)
    assert verified.token_ids == full.token_ids
    assert len(set(verified.exit_layers)) > 1
    assert set(generate(model, source, 16, kv_policy="static", static_layer=3).exit_layers[1:]) == {3}


@pytest.mark.parametrize("shape", ["t5, deep encoder", "v1.1, deep decoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_export_is_the_import_to_the_bit(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    theirs: Any = hugging_face_t5(tmp_path / "first", **SHAPES[shape])
    theirs.to(dtype).save_pretrained(tmp_path / "hf")
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((1,), "norm")))
    first, second = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) and tensor.dtype == dtype for name, tensor in first.items())
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    loaded: Any = T5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=dtype)
    again, report = loaded
    assert not any(report.values()), report
    source, target = token_ids(2, 6), token_ids(2, 5)
    assert torch.equal(again(source, decoder_input_ids=target).logits, theirs(source, decoder_input_ids=target).logits)


@torch.no_grad()
def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf")
    exact, rounded = load_t5(tmp_path / "hf").model, load_t5(tmp_path / "hf", dtype=torch.bfloat16).model
    source, target = token_ids(2, 9), token_ids(2, 7)
    expected, got = exact(source, target).logits[4], rounded(source, target).logits[4]
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() < 0.1 * expected.norm()


def test_shards_and_other_spellings_of_names(tmp_path: Path) -> None:
    """Shards, the embedding under its other names, a bias nobody reads, a configuration as of old."""
    theirs = hugging_face_t5(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    tensors = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "old").mkdir()
    more = {
        "encoder.embed_tokens.weight": tensors["shared.weight"].clone(),
        "decoder.embed_tokens.weight": tensors["shared.weight"].clone(),
        "lm_head.weight": tensors["shared.weight"].clone(),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4),
    }
    save_file({**tensors, **more}, tmp_path / "old/model.safetensors")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for field in ("num_decoder_layers", "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs"):
        del config[field]
    for field in ("relative_attention_max_distance", "tie_word_embeddings", "eos_token_id", "architectures"):
        del config[field]
    (tmp_path / "old/config.json").write_text(json.dumps({**config, "num_decoder_layers": 4}))
    expected = load_t5(tmp_path / "hf")
    for name in ("shards", "old"):
        got = load_t5(tmp_path / name)
        assert got.config == expected.config
        assert got.eos_token_ids == (EOS_ID,)
        state = got.model.state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in expected.model.state_dict().items())
    save_checkpoint(tmp_path / "out", load_any_checkpoint(tmp_path / "old"))
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys()


def test_one_embedding_under_two_names_must_be_one(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(OfframpError, match="is a copy of another one and differs from it"):
        load_t5(tmp_path / "hf")


@torch.no_grad()
def test_who_ties_and_who_scales(tmp_path: Path) -> None:
    """transformers 5 writes the same configuration for a v1.1 with an unembedding of its own and for one without."""
    source, target = token_ids(2, 6), token_ids(2, 5)
    for name, shape in {"own": SHAPES["v1.1"], "none": {"feed_forward_proj": "gated-gelu"}}.items():
        theirs = hugging_face_t5(tmp_path / name, **shape)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        theirs: Any = T5ForConditionalGeneration.from_pretrained(tmp_path / name).eval()
        ours = load_t5(tmp_path / name)
        assert ours.config.tie_word_embeddings == (name == "none")
        assert not ours.config.scale_outputs
        expected = theirs(source, decoder_input_ids=target).logits
        assert_equal(ours.model(source, target).logits[4], expected)


def test_a_v1_1_without_its_unembedding_is_incomplete(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES["v1.1"])
    tensors = load_file(tmp_path / "hf/model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(OfframpError, match=r"lacks 1 tensors, the first is 'lm_head\.weight'"):
        load_t5(tmp_path / "hf")


def test_a_complete_directory_keeps_its_tokenizer(tmp_path: Path) -> None:
    t5_directory(tmp_path / "hf")
    (tmp_path / "hf/spiece.model").write_bytes(b"pieces")
    import_model(str(tmp_path / "hf"), tmp_path / "out")
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file
