"""A file with a row per simulated request: CSV or Parquet, by its name."""

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from prfaas.lab.simulator.result import Result


def write_records(path: Path, results: Mapping[str, Result]) -> int:
    """All requests under the first policy, then under the next. The same results give the same bytes.

    Args:
        path: packed if its name ends in .gz; Parquet if it ends in .parquet.
        results: by policy, which is the first column; the others are those of `Result.table`. Times that never came are
            empty.

    Returns:
        The number of rows.

    Raises:
        OSError: the file can't be written.
    """
    if path.suffix.lower() == ".parquet":
        _write_parquet(path, results)
        return sum(len(result.arrival_s) for result in results.values())
    with _opened(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, (policy, result) in enumerate(results.items()):
            columns = result.table()
            if number == 0:
                writer.writerow(["policy", *columns])
            words = [
                np.where(each, "true", "false") if each.dtype == bool else each for each in columns.values()
            ]
            writer.writerows((policy, *row) for row in zip(*map(_plain, words), strict=True))
    return sum(len(result.arrival_s) for result in results.values())


def _write_parquet(path: Path, results: Mapping[str, Result]) -> None:
    import pandas

    frames = []
    for policy, result in results.items():
        frame = result.to_dataframe()
        frame.insert(0, "policy", policy)
        frames.append(frame)
    pandas.concat(frames, ignore_index=True).to_parquet(path, compression="zstd", index=False)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Packed if the name ends in .gz, without a name and a time in it."""
    with path.open("wb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed, _text(packed) as file:
                yield file
        else:
            with _text(raw) as file:
                yield file


def _text(raw: IO[bytes] | gzip.GzipFile) -> io.TextIOWrapper:
    return io.TextIOWrapper(raw, encoding="utf-8", newline="")


def _plain(values: "np.ndarray[Any, Any]") -> list[Any]:
    """Python's numbers, None for what is no number."""
    if values.dtype.kind != "f":
        return list(values.tolist())
    plain = values.astype(object)
    plain[np.isnan(values)] = None
    return list(plain.tolist())
