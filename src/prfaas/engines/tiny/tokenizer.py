"""Writing the byte-level tokenizer of the tiny models in the files that Hugging Face loaders read."""

import json
from pathlib import Path

from prfaas.engines.tiny.vocabulary import CHAT_TEMPLATE, SPECIAL_TOKENS


def byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, at the index of the byte.

    Bytes that are printable in Latin-1 stand for themselves; the other ones, in order, get the code points from 256 on
    (the convention of GPT-2's vocabulary, which `tokenizers`' ByteLevel pre-tokenizer and decoder apply).
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, next_code_point = [], 256
    for byte in range(256):
        if byte in own:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(next_code_point))
            next_code_point += 1
    return symbols


def write_tokenizer(directory: Path, max_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `directory`.

    One UTF-8 byte is one token, so the number of tokens of a text can be read off it. No text adds special tokens by
    itself. `max_tokens` is the model's context length, in tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)

    pad, begin, end, turn_start, turn_end = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": begin,
        "eos_token": end,
        "additional_special_tokens": [turn_start, turn_end],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
