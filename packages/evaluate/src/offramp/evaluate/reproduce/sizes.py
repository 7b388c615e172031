"""How large an experiment is: the model's shape, how long it is trained, and how much is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_MEASURING = ("calibration_prompts", "test_prompts", "masked_prompts", "speed_prompts", "batch_sizes", "rounds")


@dataclass(frozen=True)
class Size:
    """One size of the experiment. Shapes are those of T5 v1.1: gated GELU, and an unembedding of its own.

    Attributes:
        name: what `--size` calls it.
        hidden: D, numbers of a state.
        feed_forward: F.
        heads: query heads.
        head_dim: E.
        encoder_layers: of the encoder, which always runs whole.
        decoder_layers: L; an exit lies after each of them.
        vocabulary: tokens of the tokenizer that is trained; at most as many.
        steps: optimizer steps of each model.
        rows: packed rows in one step.
        learning_rate: at its peak.
        validate_every: steps between validations; the best checkpoint by the final exit's loss is exported.
        classifier_states: target tokens whose states classifiers are trained on.
        classifier_steps: steps of their training.
        training_pairs: most pairs that are trained on; None: all.
        calibration_prompts: most sources that thresholds are chosen on.
        test_prompts: most sources that quality is measured on.
        masked_prompts: how many of them are also answered with masked keys and values, by naive generation.
        speed_prompts: most sources that speed is measured on; eight for every sequence at once suffice.
        batch_sizes: sequences at once; the last but one is that of Figures 1 and 2.
        rounds: how often each contestant is measured, in turns.
    """

    name: str
    hidden: int
    feed_forward: int
    heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    vocabulary: int
    steps: int
    rows: int
    learning_rate: float
    validate_every: int
    classifier_states: int
    classifier_steps: int
    training_pairs: int | None
    calibration_prompts: int
    test_prompts: int
    masked_prompts: int
    speed_prompts: int
    batch_sizes: tuple[int, ...]
    rounds: int

    @property
    def half(self) -> int:
        """Decoder layers of the static half and of the shallow model."""
        return self.decoder_layers // 2

    @property
    def figure_batch(self) -> int:
        """Sequences at once in Figures 1 and 2; the paper does not say how many there are in its own."""
        return self.batch_sizes[-2]

    @property
    def training(self) -> dict[str, Any]:
        """What trained models depend on, as plain containers."""
        return {name: value for name, value in asdict(self).items() if name not in _MEASURING}

    @property
    def measuring(self) -> dict[str, Any]:
        """What measurements depend on beside the models."""
        return {name: value for name, value in asdict(self).items() if name in _MEASURING}

    def model_config(self, decoder_layers: int) -> dict[str, Any]:
        """Hugging Face's `config.json` of a model with so many decoder layers."""
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": self.vocabulary,
            "d_model": self.hidden,
            "d_kv": self.head_dim,
            "d_ff": self.feed_forward,
            "num_heads": self.heads,
            "num_layers": self.encoder_layers,
            "num_decoder_layers": decoder_layers,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "dtype": "float32",
        }


TINY = Size(
    name="tiny",
    hidden=32,
    feed_forward=64,
    heads=2,
    head_dim=16,
    encoder_layers=1,
    decoder_layers=4,
    vocabulary=320,
    steps=20,
    rows=4,
    learning_rate=5.0e-3,
    validate_every=10,
    classifier_states=400,
    classifier_steps=10,
    training_pairs=200,
    calibration_prompts=4,
    test_prompts=6,
    masked_prompts=2,
    speed_prompts=4,
    batch_sizes=(2, 4),
    rounds=1,
)
SMALL = Size(
    name="small",
    hidden=192,
    feed_forward=512,
    heads=6,
    head_dim=32,
    encoder_layers=4,
    decoder_layers=8,
    vocabulary=1024,
    steps=400,
    rows=8,
    learning_rate=3.0e-3,
    validate_every=50,
    classifier_states=20_000,
    classifier_steps=400,
    training_pairs=20_000,
    calibration_prompts=200,
    test_prompts=300,
    masked_prompts=80,
    speed_prompts=96,
    batch_sizes=(1, 4, 8, 16, 32),
    rounds=7,
)
BASE = Size(
    name="base",
    hidden=512,
    feed_forward=1024,
    heads=8,
    head_dim=64,
    encoder_layers=6,
    decoder_layers=12,
    vocabulary=8192,
    steps=4000,
    rows=32,
    learning_rate=1.0e-3,
    validate_every=200,
    classifier_states=100_000,
    classifier_steps=1000,
    training_pairs=None,
    calibration_prompts=500,
    test_prompts=1000,
    masked_prompts=100,
    speed_prompts=256,
    batch_sizes=(1, 4, 8, 16, 32),
    rounds=5,
)
SIZES = {size.name: size for size in (TINY, SMALL, BASE)}
