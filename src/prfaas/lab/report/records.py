"""A file with a row per simulated request: Parquet, CSV or JSON lines, by its name."""

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from prfaas.core.extras import how_to_install
from prfaas.lab.simulator.result import Result

if TYPE_CHECKING:
    from pyarrow import Table

_TEXT = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
METADATA_KEY = b"prfaas"
"""In a Parquet file's metadata, the JSON of what was simulated and of the results."""


@dataclass(frozen=True, slots=True)
class RecordsFile:
    """Where the rows go. The same results give the same bytes."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "RecordsFile":
        """Looks before a long simulation whether the file can be written after it.

        Raises:
            ValueError: a name that doesn't say which format, no folder, or Parquet without pyarrow.
        """
        name = path.name.lower()
        if not name.endswith((".parquet", *_TEXT)):
            raise ValueError(f"{path}: its name must end in .parquet, {', '.join(_TEXT[:-1])} or {_TEXT[-1]}")
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(f"{path}: {what}; name a file in a folder that is there")
        if name.endswith(".parquet"):
            try:
                import pyarrow.parquet  # noqa: F401
            except ModuleNotFoundError:
                raise ValueError(
                    f"{path}: Parquet needs pyarrow ({how_to_install('records')}); .csv.gz and .jsonl.gz do not"
                ) from None
        return cls(path)

    def write(self, results: Mapping[str, Result], described: str) -> int:
        """All requests under the first policy, then under the next.

        Args:
            results: By policy, which is the first column; the others are those of `Result.table`.
            described: JSON of what was simulated, kept in a Parquet file's metadata.

        Returns:
            The number of rows.

        Raises:
            OSError: the file can't be written.
        """
        name = self.path.name.lower()
        if name.endswith(".parquet"):
            _write_parquet(self.path, results, described)
        else:
            with _opened(self.path) as file:
                is_csv = name.removesuffix(".gz").endswith(".csv")
                (_write_csv if is_csv else _write_json_lines)(file, results)
        return sum(len(result.arrival_s) for result in results.values())


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


def _write_csv(file: IO[str], results: Mapping[str, Result]) -> None:
    """Times that never came are empty."""
    writer = csv.writer(file, lineterminator="\n")
    for number, (policy, result) in enumerate(results.items()):
        columns = result.table()
        if number == 0:
            writer.writerow(["policy", *columns])
        words = [np.where(each, "true", "false") if each.dtype == bool else each for each in columns.values()]
        writer.writerows((policy, *row) for row in zip(*map(_plain, words), strict=True))


def _write_json_lines(file: IO[str], results: Mapping[str, Result]) -> None:
    """Times that never came are null."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    for policy, result in results.items():
        columns = result.table()
        for row in zip(*map(_plain, columns.values()), strict=True):
            file.write(encode({"policy": policy} | dict(zip(columns, row, strict=True))) + "\n")


def _plain(values: "np.ndarray[Any, Any]") -> list[Any]:
    """Python's numbers, None for what is no number."""
    if values.dtype.kind != "f":
        return list(values.tolist())
    plain = values.astype(object)
    plain[np.isnan(values)] = None
    return list(plain.tolist())


def _write_parquet(path: Path, results: Mapping[str, Result], described: str) -> None:
    from pyarrow import parquet

    writer = None
    try:
        for policy, result in results.items():
            table = _arrow(policy, result, described)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _arrow(policy: str, result: Result, described: str) -> "Table":
    """Times that never came are null."""
    import pyarrow

    columns = {name: pyarrow.array(values, from_pandas=True) for name, values in result.table().items()}
    codes = pyarrow.array(result.reason.astype(np.int32))
    columns["reason"] = pyarrow.DictionaryArray.from_arrays(codes, list(result.reasons))
    policies = pyarrow.DictionaryArray.from_arrays(np.zeros(len(result.reason), dtype=np.int32), [policy])
    table = pyarrow.table({"policy": policies} | columns)
    return table.replace_schema_metadata({METADATA_KEY: described.encode()})
