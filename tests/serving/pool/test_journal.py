"""The journal of a pool's file: what is there after a restart, a torn tail, a flipped byte."""

import random
from pathlib import Path

import pytest

from prfaas.serving.pool.journal import Journal, JournalDrop, JournalPage, most_record_bytes

DIGEST = bytes(range(16))
MOST_BYTES = 1 << 30


def page(number: int, identity_bytes: int = 40) -> JournalPage:
    return JournalPage(
        number.to_bytes(17, "little"), number * 4096, (number, 2**64 - 1), 7, b"tenant", b"i" * identity_bytes
    )


def opened(path: Path, most_bytes: int = MOST_BYTES) -> tuple[Journal, list[JournalPage]]:
    journal = Journal(path, DIGEST, most_bytes)
    return journal, journal.open()


def reopened(path: Path) -> list[JournalPage]:
    journal, pages = opened(path)
    journal.close()
    return pages


def test_pages_come_back_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, pages = opened(path)
    assert pages == []
    journal.append([page(3), page(1), page(2)])
    journal.append([JournalDrop(page(1).page_id)])
    journal.append([page(3)])
    journal.close()

    assert reopened(path) == [page(2), page(3)]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_costs_its_record_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path)
    journal.append([page(1), page(2)])
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])

    journal, pages = opened(path)
    assert pages == [page(1)]
    journal.append([page(5)])
    journal.close()
    assert reopened(path) == [page(1), page(5)]


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_byte_costs_one_record(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal"
    journal, _ = opened(path)
    written = [page(number) for number in range(20)]
    journal.append(written)
    journal.close()
    data = bytearray(path.read_bytes())
    data[random.Random(seed).randrange(24, len(data))] ^= 1 << seed % 8
    path.write_bytes(data)

    left = reopened(path)
    assert len(left) == 19
    assert [each for each in written if each in left] == left


@pytest.mark.parametrize("content", [b"", b"x", b"PRFJRNL1" + bytes(16), bytes(1000), b"PRFJRNL1"])
def test_a_file_of_something_else_is_an_empty_journal(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    journal, pages = opened(path)
    journal.append([page(1)])
    journal.close()

    assert pages == []
    assert reopened(path) == [page(1)]


def test_it_never_takes_more_than_it_may(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record_bytes = most_record_bytes(ranks=2, identity_bytes=40)
    most_bytes = 2 * 10 * record_bytes
    journal, _ = opened(path, most_bytes)
    for number in range(500):
        journal.append([page(number), JournalDrop(page(max(0, number - 10)).page_id)])
        assert path.stat().st_size <= most_bytes
    journal.close()

    assert reopened(path) == [page(number) for number in range(490, 500)]
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


def test_identities_are_found_after_a_rewrite(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "journal")
    journal.append([page(number, identity_bytes=number) for number in range(100)])
    journal.forget(page(50).page_id)
    journal.rewrite()

    assert journal.identity(page(99).page_id) == b"i" * 99
    assert journal.identity(page(50).page_id) == b""
    journal.close()
    assert journal.identity(page(99).page_id) == b""


def test_what_was_cleared_does_not_come_back(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "journal")
    journal.append([page(1)])
    journal.clear()
    journal.close()

    assert reopened(tmp_path / "journal") == []
