"""Streams that follow the chunks of their prefill."""

from dataclasses import replace
from typing import Any

import pytest
from tests.lab.simulator.conftest import CaseStudy, chunk_of
from tests.lab.simulator.invariants import Invariants

from prfaas.core.kv.layers import FullAttention, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.link import FluidLink
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.simulation import simulate
from prfaas.lab.simulator.transfer import KvMoves

CHUNK_TOKENS, BLOCK_TOKENS = 4096, 256
LONG_TOKENS = 9 * CHUNK_TOKENS + 700


def scenario(case_study: CaseStudy, chunk_tokens: int) -> Scenario:
    """All prompts are offloaded."""
    return case_study.still(
        policy="static_threshold",
        params={"threshold_tokens": 0},
        chunk_tokens=chunk_tokens,
        kv_block_tokens=BLOCK_TOKENS if chunk_tokens else 0,
        caches=CacheOptions(10**7),
    )


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """At what times streams went on at which rates, bits per second."""
    found: list[tuple[float, float]] = []
    produce_at = FluidLink.produce_at

    def noted(link: FluidLink, transfer: Any, bits_per_s: float) -> bool:
        found.append((link._events.now_s, bits_per_s))
        return produce_at(link, transfer, bits_per_s)

    monkeypatch.setattr(FluidLink, "produce_at", noted)
    return found


def test_each_chunk_sends_its_tokens_in_the_time_that_it_takes(
    case_study: CaseStudy, changes: list[tuple[float, float]]
) -> None:
    shown = scenario(case_study, CHUNK_TOKENS)
    simulate(shown, [chunk_of([0.0], [LONG_TOKENS])], warmup_share=0.0, on_event=Invariants())
    seconds = shown.clusters[0].curve.seconds
    streamed_bits = BITS_PER_BYTE * KvMoves(shown.sent_model).streamed_bytes(LONG_TOKENS - 1, 0)
    token_bits = streamed_bits / (LONG_TOKENS - 1)
    ends = [*range(CHUNK_TOKENS, LONG_TOKENS, CHUNK_TOKENS), LONG_TOKENS]
    times_s = [0.0, *(seconds(end) for end in ends)]
    assert [at_s for at_s, _ in changes] == pytest.approx(times_s[:-1])
    sent = [rate * (end_s - at_s) for (at_s, rate), end_s in zip(changes, times_s[1:], strict=True)]
    assert sent[:-1] == pytest.approx([token_bits * CHUNK_TOKENS] * 9)
    assert sum(sent) == pytest.approx(streamed_bits)
    # Attention makes the last chunks slower.
    assert changes[1][1] > 1.1 * changes[8][1]


@pytest.mark.parametrize("last_tokens", [1, 100, 700])
def test_windows_leave_with_the_chunks_that_compute_them(
    case_study: CaseStudy, changes: list[tuple[float, float]], last_tokens: int
) -> None:
    """Of a short last chunk most of the window is in the chunk before."""
    window, attention = SlidingWindow(3, 2, 64, 64, 512), FullAttention(1, 2, 64, 64)
    shown = replace(scenario(case_study, CHUNK_TOKENS), kv_model=KvModel("windows", (attention, window)))
    # The last token of a prompt is not sent.
    tokens = 3 * CHUNK_TOKENS + last_tokens + 1
    simulate(shown, [chunk_of([0.0], [tokens])], warmup_share=0.0, on_event=Invariants())
    seconds = shown.clusters[0].curve.seconds
    ends = [CHUNK_TOKENS, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS, tokens]
    times_s = [0.0, *(seconds(end) for end in ends)]
    sent = [rate * (end_s - at_s) for (at_s, rate), end_s in zip(changes, times_s[1:], strict=True)]
    in_last = min(last_tokens, 511)
    token_bits, window_bits = (BITS_PER_BYTE * group.token_bytes for group in (attention, window))
    assert sent == pytest.approx(
        [
            *[token_bits * CHUNK_TOKENS] * 2,
            token_bits * CHUNK_TOKENS + window_bits * (511 - in_last),
            token_bits * last_tokens + window_bits * in_last,
        ]
    )


def test_what_was_cached_leaves_with_the_first_chunk(
    case_study: CaseStudy, changes: list[tuple[float, float]]
) -> None:
    shown = scenario(case_study, CHUNK_TOKENS)
    blocks = [list(range(LONG_TOKENS // 512)), list(range(LONG_TOKENS // 512 + 16))]
    tokens = [len(each) * 512 for each in blocks]
    simulate(shown, [chunk_of([0.0, 1000.0], tokens, blocks=blocks)], warmup_share=0.0, on_event=Invariants())
    again = [change for change in changes if change[0] >= 1000.0]
    # The decode instance has the prefix too, so it is neither computed nor sent again.
    curve = shown.clusters[0].curve
    assert len(again) == 2
    lasts_s = curve.after_prefix_s(CHUNK_TOKENS, tokens[0])
    assert again[1][0] - again[0][0] == pytest.approx(lasts_s, rel=1e-6)


def test_without_chunks_a_stream_comes_evenly(
    case_study: CaseStudy, changes: list[tuple[float, float]]
) -> None:
    simulate(
        scenario(case_study, 0), [chunk_of([0.0], [LONG_TOKENS])], warmup_share=0.0, on_event=Invariants()
    )
    assert changes == []
