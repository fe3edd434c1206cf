"""The form of log lines: one per record whatever is in it, in text and in JSON, and few of the same kind."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.logs import PEER, REQUEST_ID, LogSettings, RepeatFilter, one_line, set_up_logging

logger = logging.getLogger("prfaas.serving.test_logs")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    ours, root = logging.getLogger("prfaas"), logging.getLogger()
    before = (ours.handlers[:], ours.level, ours.propagate, root.handlers[:], root.level)
    # A connector of an earlier test may have set them up, and pytest listens at every logger that does not propagate.
    ours.handlers[:], ours.propagate = [], True
    yield
    ours.handlers[:], ours.level, ours.propagate = before[0], before[1], before[2]
    root.handlers[:], root.level = before[3], before[4]


def written(form: Any = "text", level: str = "info", **options: Any) -> io.StringIO:
    stream = io.StringIO()
    set_up_logging(LogSettings(form, level), stream=stream, **options)
    return stream


def test_a_line_of_text() -> None:
    stream = written()
    request_id, peer = REQUEST_ID.set("0c5f"), PEER.set("10.0.0.9")
    try:
        logger.warning(
            "%s does not answer", "home-decode-0", extra={"fields": {"status": None, "path": "/a b"}}
        )
    finally:
        REQUEST_ID.reset(request_id)
        PEER.reset(peer)
    time, rest = stream.getvalue().split(" ", 1)
    assert len(time) == len("2026-11-22T11:42:09.123Z") and time.endswith("Z")
    assert rest == (
        "warning prfaas.serving.test_logs request_id=0c5f peer=10.0.0.9 home-decode-0 does not answer "
        'status=- path="/a b"\n'
    )


def test_a_line_of_json() -> None:
    stream = written("json")
    logger.info("ready", extra={"fields": {"tokens": 5, "ttft_s": None}})
    told = json.loads(stream.getvalue())
    del told["time"]
    assert told == {
        "level": "info",
        "logger": "prfaas.serving.test_logs",
        "message": "ready",
        "tokens": 5,
        "ttft_s": None,
    }


@given(text=st.text(), form=st.sampled_from(["text", "json"]))
def test_no_text_makes_a_second_line(text: str, form: str) -> None:
    stream = written(form)
    request_id = REQUEST_ID.set(text)
    try:
        logger.info("from outside: %s", text, extra={"fields": {"name": text}})
    finally:
        REQUEST_ID.reset(request_id)
    line = stream.getvalue()
    assert line.endswith("\n") and len(line.splitlines()) == 1
    if form == "json":
        assert json.loads(line)["name"] == one_line(text)


@given(text=st.text(max_size=799))
def test_what_is_printable_stays(text: str) -> None:
    assert one_line(text).isprintable()
    if text.isprintable():
        assert one_line(text) == text


def test_a_field_cannot_pass_for_another() -> None:
    stream = written()
    logger.info("answered", extra={"fields": {"path": '/x status=200 "', "status": 404}})
    assert stream.getvalue().endswith('path="/x status=200 \\"" status=404\n')


def test_exceptions_are_one_line_without_what_they_quote() -> None:
    stream = written()
    try:
        raise ValueError("the prompt is: secret")
    except ValueError:
        logger.exception("it failed")
    (line,) = stream.getvalue().splitlines()
    assert "secret" not in line
    assert 'it failed exception="ValueError in test_exceptions_are_one_line_without_what_they_quote ' in line
    try:
        raise ConnectionResetError(104, "Connection reset by peer")
    except OSError:
        logger.exception("it failed")
    assert "ConnectionResetError: Connection reset by peer in " in stream.getvalue()


def test_a_record_that_cannot_be_written_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stream = written()
    logger.info("%d tokens", "secret")
    assert stream.getvalue() == ""
    # Threads of other tests may write there as well.
    told = capsys.readouterr().err
    assert "a log record of prfaas.serving.test_logs could not be written\n" in told
    assert "secret" not in told


def test_repeated_warnings_are_counted() -> None:
    now_s = 0.0
    repeats = RepeatFilter(burst=2, window_s=10.0, max_kinds=2, clock=lambda: now_s)

    def passes(text: str = "%s is out", level: int = logging.WARNING) -> int | None:
        record = logging.LogRecord("prfaas.x", level, "x.py", 1, text, ("a",), None)
        return getattr(record, "left_out", 0) if repeats.filter(record) else None

    assert [passes() for _ in range(5)] == [0, 0, None, None, None]
    assert passes("another kind") == 0
    assert [passes(level=logging.INFO) for _ in range(3)] == [0, 0, 0]
    now_s = 10.0
    assert [passes() for _ in range(3)] == [3, 0, None]
    # Bounded: the least recent kind is forgotten, and what was counted of it.
    passes("a third")
    passes("a fourth")
    assert passes() == 0


def test_the_count_is_in_the_line() -> None:
    now_s = 0.0
    stream = io.StringIO()
    handler = set_up_logging(LogSettings(), stream=stream)
    handler.filters[:] = [RepeatFilter(clock=lambda: now_s)]
    for _ in range(8):
        logger.warning("again")
    now_s = 11.0
    logger.warning("again")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6 and lines[-1].endswith("again left_out=3")


def test_nobody_is_waited_for() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        handler = set_up_logging(LogSettings(), stream=writer)
        handler.filters.clear()

        def write() -> None:
            for _ in range(7):
                logger.warning("to nobody")

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(60)
        stuck = thread.is_alive()
        os.set_blocking(reading, False)
        while reader.read(1 << 20):
            pass
        assert not stuck
        logger.warning("to somebody")
        lines = reader.read().decode().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == [
        "7 lines before this one were lost: nobody read them",
        "to somebody",
    ]


def test_levels_and_a_second_set_up() -> None:
    first = written(level="warning")
    logger.info("not this")
    second = written(level="debug")
    logger.debug("this")
    assert first.getvalue() == "" and second.getvalue().count("\n") == 1


def test_loggers_of_others_stay_as_they_are() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("vllm").handlers[:])
    stream = written()
    logging.getLogger("vllm").warning("vLLM's own")
    assert (root.handlers[:], root.level, logging.getLogger("vllm").handlers[:]) == before
    assert stream.getvalue() == "" and not logging.getLogger("prfaas").propagate


def test_a_process_of_ours_writes_what_libraries_warn_of() -> None:
    stream = written(whole_process=True)
    logging.getLogger("aiohttp.server").warning("a warning")
    logging.getLogger("asyncio").info("not this")
    logging.getLogger("asyncio").error("Exception in callback f(b'secret')\nhandle: <Handle f(b'secret')>")
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "aiohttp.server a warning",
        "asyncio Exception in callback f",
    ]


def test_settings_travel_by_environment() -> None:
    settings = LogSettings("json", "debug")
    assert LogSettings.of_environment(settings.environment()) == settings
    assert (
        LogSettings.of_environment({"PRFAAS_LOG_LEVEL": "loud", "PRFAAS_LOG_FORMAT": "xml"}) == LogSettings()
    )


def test_it_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import prfaas.serving.logs\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "['prfaas']\n"
