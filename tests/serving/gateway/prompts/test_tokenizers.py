"""Which library tokenizes: the fast one only where its ids are those of the reference."""

import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prfaas.serving.gateway.prompts.tokenizers import FastEncoder, ReferenceEncoder, encoder_of

from ..stand_in import write_tokenizer


def pretend(monkeypatch: pytest.MonkeyPatch, encode: Callable[[Tokenizer, str, bool], list[int]]) -> None:
    """A fastokens whose tokenizer gives the ids of `encode`."""

    class Fake:
        def __init__(self, file: str) -> None:
            self._tokenizer = Tokenizer.from_file(file)

        @classmethod
        def from_file(cls, file: str) -> "Fake":
            return cls(file)

        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

        def encode_batch_flat(self, texts: list[str], *, add_special_tokens: bool) -> tuple[bytes, bytes]:
            (text,) = texts
            return array("I", encode(self._tokenizer, text, add_special_tokens)).tobytes(), b""

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=Fake))


def true_ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model") / "tokenizer.json"


def test_the_fast_one_is_used_where_it_agrees(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, true_ids)
    encoder = encoder_of(file)
    assert isinstance(encoder, FastEncoder)
    ids = encoder.encode("hi<|im_end|>", add_special_tokens=True)
    assert ids == array("I", Tokenizer.from_file(str(file)).encode("hi<|im_end|>").ids)


def _nothing(_tokenizer: Tokenizer, _text: str, _special: bool) -> list[int]:
    return []


def _no_special(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return true_ids(tokenizer, text.replace("<|im_start|>", "<|im_start| >"), special)


def _other_spaces(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return true_ids(tokenizer, text.replace("\u00a0", " "), special)


def _fails(_tokenizer: Tokenizer, _text: str, _special: bool) -> list[int]:
    raise ValueError("not this one")


class _Panic(BaseException):
    """As a panic in Rust code comes."""


def _panics(_tokenizer: Tokenizer, _text: str, _special: bool) -> list[int]:
    raise _Panic


@pytest.mark.parametrize("encode", [_nothing, _no_special, _other_spaces, _fails, _panics])
def test_one_that_differs_or_fails_is_not(
    file: Path, monkeypatch: pytest.MonkeyPatch, encode: Callable[[Tokenizer, str, bool], list[int]]
) -> None:
    pretend(monkeypatch, encode)
    assert isinstance(encoder_of(file), ReferenceEncoder)


def test_without_fastokens_it_is_tokenizers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = encoder_of(file)
    assert isinstance(encoder, ReferenceEncoder)
    assert (
        encoder.encode("é", add_special_tokens=False).tolist()
        == Tokenizer.from_file(str(file)).encode("é").ids
    )


def test_truncation_and_padding_of_the_file_are_off(file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(file))
    assert len(encoder_of(file).encode("abcdef", add_special_tokens=True)) == 6


_real: dict[str, Any] = {}


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60), st.booleans())
def test_the_real_fastokens_gives_the_ids_of_tokenizers(
    tmp_path_factory: pytest.TempPathFactory, text: str, special: bool
) -> None:
    pytest.importorskip("fastokens")
    if not _real:
        file = write_tokenizer(tmp_path_factory.mktemp("real")) / "tokenizer.json"
        _real["fast"], _real["reference"] = (
            FastEncoder(file, 300),
            ReferenceEncoder(Tokenizer.from_file(str(file))),
        )
    for piece in (text, f"<|im_start|>{text}<|im_end|>"):
        ids = _real["fast"].encode(piece, add_special_tokens=special)
        assert ids == _real["reference"].encode(piece, add_special_tokens=special)
