"""Tokenizers of the two kinds there are, trained on nothing and small enough to build in a test."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGED = ("th", "the", " the", " a", "is", " is", "é", "日", "本", "日本", " 日", "\n\n", "!!", "🙂")


def byte_level() -> PreTrainedTokenizerFast:
    """Llama 3, Qwen, SmolLM: 256 bytes and some merges, characters cut anywhere; id 0 is special."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {"<|end|>": 0}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges: list[tuple[str, str]] = []
    for text in MERGED:
        ((letters, _),) = encode.pre_tokenize_str(text)
        for stop in range(2, len(letters) + 1):
            pair = (letters[: stop - 1], letters[stop - 1])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = encode
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2, Mistral: words marked at their beginning, the first space stripped, rare characters in bytes."""
    vocab = {"<unk>": 0, "</s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁the", "▁a", "th", "e", "a", "b", "s", "▁▁", ".", ",", "é", "日"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def ids_of(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
    """Token ids of vocabulary entries, each of which must exist."""
    vocab = tokenizer.get_vocab()
    return [vocab[piece] for piece in pieces]
