"""The tokenizer of a GGUF file as `tokenizer.json`, which the gateway and vLLM read.

Pre-tokenizers are not in the file; it only names them. They are built here as the models' own: transformers' converter
leaves out that SmolLM2 takes every digit by itself, and does not put Gemma's BOS in front.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

# `gguf.TokenType`.
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"


def write_tokenizer(reader: "GGUFReader", directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `directory`, and the chat template where the file has one.

    Raises:
        ValueError: the file has a tokenizer of another kind.
    """
    fields = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }
    kind = fields["ggml.model"], fields["ggml.pre"]
    if kind == ("gpt2", "smollm"):
        tokenizer = _byte_level(fields["ggml.tokens"], fields["ggml.merges"])
    elif kind == ("llama", "default"):
        tokenizer = _sentence_pieces(fields["ggml.tokens"], _token(fields, "unknown"))
    else:
        raise ValueError(f"a GGUF file with a tokenizer of the kind {kind[0]}, {kind[1]}, which is not known")
    _add_tokens(tokenizer, fields["ggml.tokens"], fields["ggml.token_type"])
    begin = _token(fields, "bos")
    if fields["ggml.add_bos_token"]:
        _put_in_front(tokenizer, begin, fields["ggml.bos_token_id"])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    architecture = reader.fields["general.architecture"].contents()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": _token(fields, "eos"),
        "unk_token": _token(fields, "unknown"),
        "pad_token": _token(fields, "padding"),
        "add_bos_token": bool(fields["ggml.add_bos_token"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(reader.fields[f"{architecture}.context_length"].contents()),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    if "chat_template" in fields:
        (directory / "chat_template.jinja").write_text(fields["chat_template"])


def _token(fields: Mapping[str, Any], role: str) -> str:
    return str(fields["ggml.tokens"][fields[f"ggml.{role}_token_id"]])


def _byte_level(tokens: Sequence[str], merges: Sequence[str]) -> "Tokenizer":
    """GPT-2's kind, with every digit by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(tokens: Sequence[str], unknown: str) -> "Tokenizer":
    """SentencePiece's BPE over whole texts, bytes for what it does not know."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(_merges(vocab)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every two tokens that are a third one together. Those come first that make the token with the lower id."""
    for token in vocab:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
        yield from sorted(known, key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))


def _add_tokens(tokenizer: "Tokenizer", tokens: Sequence[str], types: Sequence[int]) -> None:
    """What is found in a text before anything is merged, the longest first."""
    from tokenizers import AddedToken

    for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)


def _put_in_front(tokenizer: "Tokenizer", token: str, token_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, int(token_id))]
    )
