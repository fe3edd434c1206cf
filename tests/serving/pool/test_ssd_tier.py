"""Pages on SSD: what was written is read, what is wrong is dropped, what fails disturbs nobody."""

import logging
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.serving.pool.journal import Journal

from .ssd_tiers import LEAD, MOST_BYTES, STATE, SsdPool, folder_bytes


@contextmanager
def running(folder: Path, **settings: object) -> Iterator[SsdPool]:
    pool = SsdPool(folder, **settings)  # type: ignore[arg-type]
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "pool"


@pytest.mark.parametrize("group", [LEAD, STATE])
def test_a_page_is_read_as_it_was_written(folder: Path, group: int) -> None:
    with running(folder) as pool:
        assert pool.write(1, group)
        assert pool.holds(1, group)
        assert pool.read(1, group) == pool.content(1, group)
        figures = pool.tier.figures()
        assert figures["promoted_bytes"] == figures["written_bytes"] and float(figures["promoting_s"]) > 0


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("group", [LEAD, STATE])
def test_pages_that_follow_each_other_are_read_at_once(folder: Path, group: int, is_aligned: bool) -> None:
    with running(folder, is_aligned=is_aligned) as pool:
        numbers = list(range(20))
        assert pool.write_all(numbers, group)
        assert pool.read_all(numbers, group) == [pool.content(number, group) for number in numbers]
        numbers = [3, 4, 5, 17, 1, 2, 0]
        assert pool.read_all(numbers, group) == [pool.content(number, group) for number in numbers]


@pytest.mark.parametrize("is_aligned", [True, False])
def test_a_wrong_page_among_others_is_wrong_alone(folder: Path, is_aligned: bool) -> None:
    with running(folder, is_aligned=is_aligned) as pool:
        numbers = list(range(20))
        assert pool.write_all(numbers)
        data_file = next(folder.glob("*.pages"))
        position = data_file.read_bytes().find(pool.content(7)[:64])
        with data_file.open("r+b") as file:
            file.seek(position)
            file.write(b"wrong")
            file.flush()
            os.fsync(file.fileno())
        assert pool.read_all(numbers) == [pool.content(each) if each != 7 else None for each in numbers]


@pytest.mark.parametrize("rank_bytes", [64, 4096, (1 << 20) + 64, 3 << 20])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_pages_of_any_size(folder: Path, rank_bytes: int, is_aligned: bool) -> None:
    geometry = PoolGeometry("model", 3, (PageGroup(0, GroupKind.FULL, 16, 0, rank_bytes),))
    with running(folder, geometry=geometry, most_bytes=40 << 20, is_aligned=is_aligned) as pool:
        assert pool.write_all([7, 8])
        assert pool.read_all([7, 8]) == [pool.content(7), pool.content(8)]


def test_files_are_for_their_owner_only(folder: Path) -> None:
    with running(folder) as pool:
        pool.write(1)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [each.stat().st_mode & 0o777 for each in folder.iterdir()] == [0o600, 0o600]


def test_pages_outlive_the_daemon(folder: Path) -> None:
    with running(folder) as pool:
        for number in range(8):
            assert pool.write(number, number % 2, tenant=b"tenant%d" % number)
        written = [pool.entry(number, number % 2, b"tenant%d" % number) for number in range(8)]

    with running(folder) as pool:
        assert list(pool.tier.entries()) == written
        assert [pool.tier.entry(each.page_id) for each in written] == written
        assert [pool.read(number, number % 2) for number in range(8)] == [
            pool.content(number, number % 2) for number in range(8)
        ]


def test_the_least_recently_used_page_goes(folder: Path) -> None:
    with running(folder) as pool:
        pool.write_all(range(8))
        number = 8
        while not pool.dropped:
            pool.read(0)
            assert pool.write_all(range(number, number + 8))
            number += 8
        gone = len(pool.dropped)
        assert pool.dropped == [pool.entry(number).page_id for number in range(1, gone + 1)]
        assert pool.read(0) == pool.content(0)


def test_room_moves_between_groups(folder: Path) -> None:
    with running(folder) as pool:
        for group in (LEAD, STATE, LEAD):
            assert pool.write_all(range(1000 * group, 1000 * group + 300), group)
        held = sum(pool.holds(number) for number in range(300))
        assert held * pool.geometry.page_bytes(LEAD) > 0.3 * MOST_BYTES
        assert pool.tier.figures()["used_bytes"] <= MOST_BYTES


def test_both_files_together_stay_below_the_cap(folder: Path) -> None:
    with running(folder) as pool:
        chosen = random.Random(1)
        for _ in range(30):
            pool.write_all(chosen.sample(range(400), 20), chosen.randrange(2))
        assert folder_bytes(folder) <= MOST_BYTES


def test_a_cap_without_room_for_a_page_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="give the pool more"):
        SsdPool(folder, most_bytes=30_000)


def test_a_tenant_above_its_share_loses_its_own_pages(folder: Path) -> None:
    with running(folder, tenant_share=0.5) as pool:
        assert pool.write_all(range(10), tenant=b"B")
        assert pool.write_all(range(100, 400), tenant=b"A")
        assert all(pool.holds(number) for number in range(10))
        assert pool.dropped


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_byte_is_found_and_the_page_dropped(folder: Path, seed: int) -> None:
    chosen = random.Random(seed)
    with running(folder) as pool:
        for number in range(6):
            pool.write(number, number % 2)
        data_file = next(folder.glob("*.pages"))
        position = chosen.choice(
            [data_file.read_bytes().find(pool.content(number, number % 2)[:64]) for number in range(6)]
        )
        with data_file.open("r+b") as file:
            place = position + chosen.randrange(2048)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chosen.randrange(8)]))
            file.flush()
            os.fsync(file.fileno())
        contents = [pool.read(number, number % 2) for number in range(6)]
        assert contents.count(None) == 1
        wrong = contents.index(None)
        assert all(
            content == pool.content(number, number % 2)
            for number, content in enumerate(contents)
            if number != wrong
        )
        assert pool.dropped == [pool.entry(wrong, wrong % 2).page_id]
        assert pool.tier.figures()["wrong"] == 1
        assert not pool.holds(wrong, wrong % 2)

    with running(folder) as pool:
        assert len(list(pool.tier.entries())) == 5


def test_an_identity_that_was_changed_on_disk_is_found(folder: Path) -> None:
    with running(folder) as pool:
        pool.write(1)
        data_file = next(folder.glob("*.pages"))
        position = data_file.read_bytes().find(pool.content(1)[4096 : 4096 + 64])
        with data_file.open("r+b") as file:
            file.seek(position)
            file.write(bytes(8))
            file.flush()
            os.fsync(file.fileno())
        assert pool.read(1) is None


def test_verify_reads_all_pages_and_drops_wrong_ones(folder: Path) -> None:
    with running(folder) as pool:
        pool.write_all(range(9))
        assert pool.verify() == (9, 0)
        data_file = next(folder.glob("*.pages"))
        size = data_file.stat().st_size
        os.truncate(data_file, 2 * 8192)
        os.truncate(data_file, size)
        right, wrong = pool.verify()
        assert (right + wrong, wrong > 0) == (9, True)
        assert len(pool.dropped) == wrong
        assert pool.verify() == (right, 0)


def test_a_truncated_file_costs_the_pages_that_lay_behind(folder: Path) -> None:
    with running(folder) as pool:
        pool.write_all(range(9))
    os.truncate(next(folder.glob("*.pages")), 2 * 8192 + 100)

    with running(folder) as pool:
        assert len(list(pool.tier.entries())) == 2
        held = [number for number in range(9) if pool.holds(number)]
        assert [pool.read(number) for number in held] == [pool.content(number) for number in held]


def test_cleared_pages_do_not_come_back(folder: Path) -> None:
    with running(folder) as pool:
        pool.write_all(range(5))
        pool.tier.clear()
        assert not pool.holds(1)
        assert pool.write(9)
    with running(folder) as pool:
        assert [each.page_id for each in pool.tier.entries()] == [pool.entry(9).page_id]


def test_a_page_that_is_forgotten_while_it_is_written_is_not_there(folder: Path) -> None:
    with running(folder) as pool:
        results: list[bool] = []
        pool.tier.write(pool.entry(1), 0, results.append)
        pool.tier.forget(pool.entry(1).page_id)
        pool.loop.until(lambda: bool(results))
        assert results == [False]
        assert not pool.holds(1)
    with running(folder) as pool:
        assert list(pool.tier.entries()) == []


def test_a_full_queue_takes_no_more(folder: Path) -> None:
    with running(folder, most_queued_bytes=6_000) as pool:
        results: list[bool] = []
        for number in range(3):
            assert pool.tier.takes_more == (number < 2)
            pool.tier.write(pool.entry(number), 0, results.append)
        assert results == [False]
        assert pool.tier.figures()["not_written"] == 1
        pool.loop.until(lambda: len(results) == 3)
        assert results == [False, True, True]
        assert pool.tier.takes_more


def test_files_of_another_model_go(folder: Path) -> None:
    with running(folder) as pool:
        pool.write(1)
    other = PoolGeometry("another", 2, pool.geometry.groups)
    with running(folder, geometry=other) as pool:
        assert list(pool.tier.entries()) == []
        assert len(list(folder.iterdir())) == 2


def test_two_daemons_do_not_share_a_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(folder) as first, running(folder) as second:
        assert first.write(1)
        assert not second.write(2)
        assert "another daemon uses it" in str(second.tier.figures()["state"])


def test_a_disk_that_is_not_there_at_the_start_is_used_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "disk" / "pool") as pool:
        pool.write(1)
    shutil.move(tmp_path / "disk", tmp_path / "elsewhere")
    (tmp_path / "disk").write_text("no folder")
    with caplog.at_level(logging.INFO), running(tmp_path / "disk" / "pool") as pool:
        assert not pool.write(2)
        assert not pool.write(2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        (tmp_path / "disk").unlink()
        shutil.move(tmp_path / "elsewhere", tmp_path / "disk")
        pool.loop.until(lambda: pool.holds(1))
        assert pool.read(1) == pool.content(1)
        assert pool.write(2)
        assert "takes pages again" in caplog.text


def test_a_folder_that_vanishes_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(folder) as pool:
        assert pool.write(1)
        shutil.rmtree(folder)
        assert not pool.write(2)
        pool.loop.until(lambda: pool.tier.figures()["state"] == "writable")
        assert pool.dropped == [pool.entry(1).page_id]
        assert pool.write(3)
        assert pool.read(3) == pool.content(3)
    with running(folder) as pool:
        assert [each.page_id for each in pool.tier.entries()] == [pool.entry(3).page_id]


def test_a_journal_that_vanishes_is_written_anew(folder: Path) -> None:
    with running(folder) as pool:
        assert pool.write(1)
        next(folder.glob("*.journal")).unlink()
        assert not pool.write(2)
        pool.loop.until(lambda: pool.tier.figures()["state"] == "writable")
        assert pool.write(3)
    with running(folder) as pool:
        assert [each.page_id for each in pool.tier.entries()] == [
            pool.entry(1).page_id,
            pool.entry(3).page_id,
        ]


def test_a_disk_that_fails_is_said_once_and_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True
    pwrite = os.pwrite

    def failing(fd: int, data: bytes, offset: int) -> int:
        if broken:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, offset)

    with running(folder) as pool:
        assert pool.write(1)
        monkeypatch.setattr("os.pwrite", failing)
        with caplog.at_level(logging.INFO):
            for number in range(2, 8):
                assert not pool.write(number)
            assert pool.read(1) == pool.content(1)
            assert len(caplog.records) == 1
            assert "No space left" in caplog.text
            broken = False
            pool.loop.until(lambda: pool.tier.figures()["state"] == "writable")
            assert pool.write(8)
            assert "takes pages again" in caplog.text
    with running(folder) as pool:
        assert {each.page_id for each in pool.tier.entries()} == {
            pool.entry(1).page_id,
            pool.entry(8).page_id,
        }


def test_a_page_that_is_being_read_stays(folder: Path) -> None:
    with running(folder) as pool:
        pool.write(0)
        size, results = pool.geometry.page_bytes(LEAD), list[bool]()
        pool.tier.read(pool.entry(0).page_id, pool.slot_bytes, results.append)
        # It is not done before the loop turns; the reader may have ended long before.
        number, evicted = 0, pool.tier.figures()["evicted"]
        written: list[bool] = []
        while evicted == pool.tier.figures()["evicted"]:
            number += 1
            pool.tier.write(pool.entry(number), 0, written.append)
            if False in written:
                break
        assert pool.holds(0)
        pool.loop.until(lambda: len(written) == number and bool(results))
        assert results == [True]
        assert bytes(pool.arena[pool.slot_bytes :][:size]) == pool.content(0)


def test_what_was_cleared_while_the_disk_fails_does_not_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_fd: int, _data: bytes, _offset: int) -> int:
        raise OSError(5, "Input/output error")

    with running(folder) as pool:
        pool.write(1)
        with monkeypatch.context() as broken:
            broken.setattr("os.pwrite", failing)
            assert not pool.write(2)
            pool.tier.clear()
        pool.loop.until(lambda: pool.tier.figures()["state"] == "writable")
    with running(folder) as pool:
        assert list(pool.tier.entries()) == []


def test_each_page_is_answered_once_though_clearing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_journal: Journal) -> None:
        raise OSError(5, "Input/output error")

    with running(folder) as pool:
        results: list[bool] = []
        with monkeypatch.context() as broken:
            broken.setattr(Journal, "clear", failing)
            with pool.tier._writer._changed:  # one batch
                pool.tier.write(pool.entry(1), 0, results.append)
                pool.tier.clear()
            pool.loop.until(lambda: pool.tier.figures()["state"] != "writable")
        pool.loop.until(lambda: pool.tier.figures()["state"] == "writable")
        pool.loop.turn()
        assert results == [False]
        assert pool.tier.figures()["queued_bytes"] == 0
        assert pool.write_all(range(10, 20))
        assert pool.read_all(range(10, 20)) == [pool.content(number) for number in range(10, 20)]


def test_what_is_queued_at_the_end_is_written(folder: Path) -> None:
    with running(folder) as pool:
        content = pool.content(5)
        pool.arena[: len(content)] = content
        pool.tier.write(pool.entry(5), 0, lambda _: None)
    with running(folder) as pool:
        assert pool.read(5) == pool.content(5)
