"""What is read out of /metrics, and what becomes of it over time."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.control.engine_monitor import EngineMeter, EngineReading, read_exposition

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
        5, 4, 0.25, 1000.0, 250.0, 2.5, 100.0, 640.0, 10.0, 1.7e9, 16, 16_000
    )


@given(
    st.binary(max_size=300)
    | st.text(max_size=300).map(lambda text: b"vllm:num_requests_running " + text.encode())
)
def test_anything_can_be_read(text: bytes) -> None:
    read_exposition(text)


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


def test_another_process_empties_the_window() -> None:
    meter = EngineMeter(60.0)
    assert not meter.add(reading(outputs=10, output_tokens=100), 0.0)
    assert not meter.add(reading(outputs=20, output_tokens=200, started_at_s=1.2), 1.0)
    assert meter.add(reading(outputs=30, started_at_s=50.0), 2.0)
    assert meter.output_tokens is None
    assert not meter.add(reading(started_at_s=None, outputs=31), 3.0)
    assert meter.add(reading(started_at_s=None, outputs=2), 4.0)
