"""A row per request, as CSV and as a data frame."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas import api
from prfaas.lab.report.records import write_records
from prfaas.lab.simulator.result import Result

COLUMNS = [
    *(
        "policy",
        "request",
        "counted",
        "arrival_s",
        "input_tokens",
        "output_tokens",
        "uncached_tokens",
        "hit_tokens",
    ),
    *("offloaded", "reason", "retries", "link_bytes", "ttft_s", "tpot_s", "e2e_s"),
    *("prefill_instance", "decode_instance", "prefill_from_s", "prefill_to_s", "kv_there_s"),
]
WORDS = ("policy", "reason", "prefill_instance", "decode_instance")
TEXT = ["r.csv", "r.csv.gz"]


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Two policies under the same requests; the last request of the first never had an answer."""
    found = {
        policy: api.simulate(api.example_path("paper"), policy=policy, requests=60)
        for policy in ("tilted", "local_only")
    }
    first = found["tilted"]
    found["tilted"] = replace(
        first, **{name: _lost(getattr(first, name)) for name in ("ttft_s", "tpot_s", "e2e_s")}
    )
    return found


def _lost(times: Any) -> Any:
    return np.append(times[:-1], np.nan)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    for row in csv.DictReader(io.StringIO(text)):
        # Words stay; numbers, booleans and nothing are as JSON has them.
        yield {name: (value if name in WORDS else json.loads(value or "null")) for name, value in row.items()}


@pytest.mark.parametrize("name", TEXT)
def test_every_request_under_every_policy(tmp_path: Path, results: dict[str, Result], name: str) -> None:
    path = tmp_path / name
    assert write_records(path, results) == 120
    rows = list(rows_of(path))
    assert len(rows) == 120 and all(list(row) == COLUMNS for row in rows)
    for number, row in enumerate(rows):
        policy = ("tilted", "local_only")[number // 60]
        result, index = results[policy], number % 60
        assert (row["policy"], row["request"]) == (policy, index)
        assert row["arrival_s"] == result.arrival_s[index]
        assert row["input_tokens"] == result.input_tokens[index]
        assert row["offloaded"] is bool(result.offloaded[index])
        assert row["counted"] is bool(result.counted[index])
        assert row["reason"] == result.reasons[result.reason[index]]
        ttft_s = result.ttft_s[index]
        assert row["ttft_s"] == (None if np.isnan(ttft_s) else ttft_s)
    assert rows[59]["e2e_s"] is None and rows[119]["e2e_s"] is not None


@pytest.mark.parametrize("name", TEXT)
def test_the_same_results_give_the_same_bytes(tmp_path: Path, results: dict[str, Result], name: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_records(tmp_path / folder / name, results)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["a.csv.gz", "a.parquet"])
def test_the_file_is_the_data_frame_with_the_policy(
    tmp_path: Path, results: dict[str, Result], name: str
) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / name
    assert write_records(path, results) == 120
    read = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    assert list(read.columns) == COLUMNS and read.e2e_s.isna().sum() == 1
    for policy, result in results.items():
        rows = read[read.policy == policy].drop(columns="policy").reset_index(drop=True)
        frame = result.to_dataframe()
        assert len(frame) == 60 and frame.reason.dtype == "category"
        pandas.testing.assert_frame_equal(
            rows, frame, check_dtype=False, check_categorical=False, check_exact=True
        )


def test_a_data_frame_says_what_the_summary_says(results: dict[str, Result]) -> None:
    pytest.importorskip("pandas")
    result = results["local_only"]
    summary, frame = result.summary(), result.to_dataframe()
    counted = frame[frame.counted]
    assert len(counted) == summary["requests"]
    assert counted.ttft_s.mean() == pytest.approx(summary["ttft_mean_s"])
    assert counted.e2e_s.quantile(0.9) == pytest.approx(summary["e2e_p90_s"])
    assert counted.offloaded.mean() == summary["offloaded_fraction"] == 0
    assert dict(counted.reason.value_counts()) == summary["decisions"]
    # Its owner may change it; the result stays.
    frame.loc[0, "ttft_s"] = -1.0
    assert result.ttft_s[0] > 0


def test_what_came_from_pools_has_columns(tmp_path: Path, results: dict[str, Result]) -> None:
    tiers = {tier: np.full(60, number) for number, tier in enumerate(("memory", "ssd", "machine", "cluster"))}
    pooled = {"tilted": replace(results["tilted"], tier_tokens=tiers)}
    path = tmp_path / "pools.csv"
    write_records(path, pooled)
    row = next(rows_of(path))
    assert [row[f"hit_tokens_{tier}"] for tier in tiers] == [0, 1, 2, 3]


def test_parts_make_up_the_ttft_of_each_request(results: dict[str, Result]) -> None:
    """Waiting, prefilling, the KVCache on its way, and the wait for a decode slot; and where all that was."""
    for result in results.values():
        rows = result.table()
        parts = [rows[name][:-1] for name in ("prefill_from_s", "prefill_to_s", "kv_there_s", "ttft_s")]
        assert (parts[0] >= 0).all()
        assert all((later >= earlier).all() for earlier, later in pairwise(parts))
        assert {each.split("-")[0] for each in rows["decode_instance"]} == {"home"}
        where = [each.split("-")[0] for each in rows["prefill_instance"]]
        assert [each == "east" for each in where] == result.offloaded.tolist()
        # One that prefills here has all KVCache when it ends.
        here = ~result.offloaded[:-1]
        assert (parts[1][here] == parts[2][here]).all()


def test_a_trace_s_other_columns_come_with_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{n},{1000 + n},5,{'blue' if n % 2 else 'red'}" for n in range(30)]
    path.write_text("\n".join(["at,in,out,team", *rows]))
    columns = {"arrival": "at", "input": "in", "output": "out"}
    result = api.simulate(api.example_path("paper"), trace=path, columns=columns, requests=40)
    teams = result.table()["trace_team"]
    assert [team == "blue" for team in teams] == (result.input_tokens % 2 == 1).tolist()
    assert len(repr(result)) < 200


def test_links_and_instances_that_are_gone_for_a_time() -> None:
    whole, gone = (
        api.simulate(api.example_path("paper"), load=0.5, requests=300, **more)
        for more in ({}, {"outages": [("east->home", 30, 60)], "failures": [("home-0", 20, 30)]})
    )
    assert gone.retries.sum() > 0 == whole.retries.sum()
    assert gone.ttft_s.max() > 2 * whole.ttft_s.max()
    with pytest.raises(ValueError, match='"nobody" cannot fail'):
        api.simulate(api.example_path("paper"), requests=50, failures=[("nobody", 1, 1)])
