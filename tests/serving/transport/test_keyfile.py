import stat
from pathlib import Path

import pytest

from prfaas.serving.secret_files import KeyFileError, create_key, load_key


def test_created_key_is_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "key"
    key = create_key(path)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(path) == key
    with pytest.raises(KeyFileError, match="exists already"):
        create_key(path)
    assert load_key(path) == key
    assert create_key(tmp_path / "other") != key


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"zz" * 32, b"\xff" * 64])
def test_wrong_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="must hold 64 hex digits"):
        load_key(path)


def test_open_to_others_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(KeyFileError, match=f"{path} cannot be read"):
        load_key(path)
    create_key(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_key(path)
    with pytest.raises(KeyFileError, match="cannot be written"):
        create_key(path / "below")
