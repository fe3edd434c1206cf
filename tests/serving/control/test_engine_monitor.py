"""What is read out of /metrics, and what becomes of it over time."""

import dataclasses
import math

from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.engine_reading import EngineReading, read_exposition

TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:inter_token_latency_seconds_bucket{le="0.01",engine="0"} 7.0
vllm:inter_token_latency_seconds_sum{engine="0"} 2.5
vllm:inter_token_latency_seconds_count{engine="0"} 100.0
vllm:request_generation_tokens_sum{engine="0"} 640
vllm:request_generation_tokens_count{engine="0"} 10
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
process_start_time_seconds 1.7e+09
vllm:kv_cache_usage_perc{engine="1"} NaN
"""


def test_the_series_that_matter() -> None:
    assert read_exposition(TEXT) == EngineReading(
        5, 4, 0.25, 1000.0, 250.0, 2.5, 100.0, 640.0, 10.0, 1.7e9, 1000
    )


ABSENT = EngineReading(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None)
RUNNING = b"vllm:num_requests_running"
NUMBERS = (
    st.floats().map(repr) | st.integers().map(str) | st.sampled_from(["1e308", "-1e308", "", "1_0", "NaN"])
)
LABELS = st.sampled_from([b"", b'{engine="0"}', b'{engine="0",model_name="a b"}', b"{", b"{}"])


@given(st.binary(max_size=300))
def test_anything_can_be_read(text: bytes) -> None:
    """What names none of the series says nothing, and takes nothing from what is written behind it."""
    if b"vllm:" not in text and b"process_start" not in text:
        assert read_exposition(text) == ABSENT
        assert read_exposition(text + b"\n" + TEXT) == read_exposition(TEXT)
    else:
        assert all_finite(read_exposition(text))


@given(st.lists(st.tuples(LABELS, NUMBERS | st.text(max_size=30)), max_size=8))
@example([(b"", "1e308"), (b"", "1e308")])
def test_what_is_no_number_counts_as_absent(samples: list[tuple[bytes, str]]) -> None:
    lines = [RUNNING + labels + b" " + value.encode(errors="replace") for labels, value in samples]
    reading = read_exposition(b"\n".join(lines))
    assert all_finite(reading)
    assert dataclasses.replace(reading, running=0) == ABSENT
    expected = 0.0
    for labels, value in samples:
        # A whole sample: its labels are closed, and its value is one word.
        if labels != b"{" and value and value.isascii() and value.isprintable() and " " not in value:
            try:
                number = float(value)
            except ValueError:
                continue
            if 0 <= number <= 2**53 and expected + number <= 2**53:
                expected += number
    if all(value.isascii() and value.isprintable() and " " not in value for _, value in samples):
        assert reading.running == int(expected)


@given(st.integers(0, 2**45).map(str) | st.sampled_from(["9" * 5000, "", "-1", "1.5", "x"]))
@example("9" * 5000)
def test_sizes_of_a_cache_are_bounded(size: str) -> None:
    reading = read_exposition(
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{size}"}} 1.0'.encode()
    )
    is_size = size.isdigit() and len(size) < 20 and 0 < int(size) <= 2**40
    assert reading == dataclasses.replace(ABSENT, cache_blocks=int(size) if is_size else None)


def all_finite(reading: EngineReading) -> bool:
    values = dataclasses.astuple(reading)
    return all(value is None or math.isfinite(value) for value in values)


def reading(**changes: float | None) -> EngineReading:
    values: dict[str, float | None] = dict.fromkeys(EngineReading.__dataclass_fields__, 0.0)
    return EngineReading(**(values | {"started_at_s": 1.0} | changes))  # type: ignore[arg-type]


def test_rates_are_of_the_window() -> None:
    meter = EngineMeter(60.0)
    assert (meter.newest, meter.token_gap_s, meter.hit_rate, meter.waiting) == (None, None, None, 0.0)
    for second in range(0, 200, 10):
        late = second >= 100
        meter.add(
            reading(
                token_gaps=second * 10,
                token_gaps_s=second * (0.5 if late else 0.1),
                outputs=second,
                output_tokens=second * 64,
                prefix_queries=second * 100,
                prefix_hits=second * 25,
                waiting=3 if late else 0,
            ),
            float(second),
        )
    assert meter.output_tokens == 64
    assert meter.hit_rate == 0.25
    assert meter.outputs == 60
    assert meter.token_gap_s is not None and abs(meter.token_gap_s - 0.05) < 1e-9
    assert meter.waiting == 3.0
    assert [round(meter.answer_s(tokens), 9) for tokens in (None, 1, 41, 1000)] == [3.15, 0.0, 2.0, 3.15]


def test_without_readings_an_answer_takes_no_time() -> None:
    assert (EngineMeter(60.0).answer_s(None), EngineMeter(60.0).answer_s(100)) == (0.0, 0.0)


def test_another_process_empties_the_window() -> None:
    meter = EngineMeter(60.0)
    assert not meter.add(reading(outputs=10, output_tokens=100), 0.0)
    assert not meter.add(reading(outputs=20, output_tokens=200, started_at_s=1.2), 1.0)
    assert meter.add(reading(outputs=30, started_at_s=50.0), 2.0)
    assert meter.output_tokens is None
    assert not meter.add(reading(started_at_s=None, outputs=31), 3.0)
    assert meter.add(reading(started_at_s=None, outputs=2), 4.0)


def test_an_engine_that_runs_and_does_not_move_is_stuck() -> None:
    meter = EngineMeter(60.0)
    idle = dataclasses.replace(ABSENT, tokens=100.0)
    busy = dataclasses.replace(idle, running=3)
    for now_s in range(100):
        meter.add(idle, float(now_s))
    assert meter.stuck_s == 0
    for now_s in range(100, 171):
        meter.add(busy, float(now_s))
    # It has nothing to do until 99, and begins.
    assert meter.stuck_s == 71
    for moved in ({"tokens": 101.0}, {"kv_usage": 0.5}, {"token_gaps": 1.0}, {"running": 0}):
        meter.add(dataclasses.replace(busy, **moved), 171.0)  # type: ignore[arg-type]
        assert meter.stuck_s == 0
        meter.add(dataclasses.replace(busy, **moved), 181.0)  # type: ignore[arg-type]
        assert meter.stuck_s == (0 if "running" in moved else 10)


def test_new_requests_are_no_progress() -> None:
    meter = EngineMeter(60.0)
    for now_s in range(70):
        arriving = {
            "running": 1 + now_s,
            "waiting": now_s,
            "kv_usage": now_s / 100,
            "prefix_queries": 9.0 * now_s,
        }
        meter.add(dataclasses.replace(ABSENT, **arriving), float(now_s))  # type: ignore[arg-type]
    assert meter.stuck_s == 69


def test_a_new_process_is_not_stuck() -> None:
    meter = EngineMeter(60.0)
    old = dataclasses.replace(ABSENT, running=3, started_at_s=1.0)
    meter.add(old, 0.0)
    meter.add(old, 70.0)
    assert meter.stuck_s == 70
    meter.add(dataclasses.replace(old, started_at_s=60.0), 71.0)
    assert meter.stuck_s == 0


def test_all_tokens_count_as_progress() -> None:
    text = b"vllm:prompt_tokens_total 7\nvllm:generation_tokens_total 5\n"
    assert read_exposition(text).tokens == 12
