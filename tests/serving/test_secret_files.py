"""A folder that its user alone can enter."""

from pathlib import Path

import pytest

from prfaas.serving.secret_files import make_private_folder


def test_a_private_folder_is_made_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deployment" / "events"
    for _ in range(2):
        make_private_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o750, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"{folder} must be a folder of this user alone"):
        make_private_folder(folder)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "events").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of this user alone"):
        make_private_folder(tmp_path / "events")
