"""What `fidelity.py` sends: prompts that have nothing in common, or conversations, whose turns begin alike."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.lengths import TruncatedLogNormal, Uniform
from prfaas.core.workload.requests import RequestTrace, TracedRequest, starts_of
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk, Traffic, take

# The conversations of the project's studies.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from studies._sessions import SessionTraffic

Kind = Literal["independent", "conversations"]
KINDS: tuple[Kind, ...] = ("independent", "conversations")

LOG_MEDIAN, LOG_SIGMA, LOW_TOKENS, HIGH_TOKENS = 8.3, 0.6, 1024, 12000
"""Prompts: log-normal around 4,000 tokens. On one core they take 0.3 to 4 s."""

LOW_ANSWER, HIGH_ANSWER = 2, 8

SHORTEST_TOKENS = 512
"""What profiles begin with."""

# A turn adds some 2,200 tokens, so that a conversation's third prompt is as long as the longest profile.
_TURN_LOG_MEDIAN, _MEAN_TURNS, _THINK_S = 7.7, 3.0, 15.0
BLOCK_TOKENS = 256
"""Of the prompts' ids: the engines' own block size, so that prompts part where the engines' blocks do."""

# Blocks of different drives are different tokens: engines still hold the prompts of the drives before.
_BLOCKS_OF_A_DRIVE = 1 << 20
_SAMPLE_S = 1000.0


def requests_at(kind: Kind, per_s: float, duration_s: float, drive: int) -> list[TracedRequest]:
    """The requests of a drive, by its number; no two drives share a prompt's beginning."""
    return _fitting(kind, per_s / _fitting_share(kind), duration_s, drive)


@cache
def _fitting_share(kind: Kind) -> float:
    return len(_fitting(kind, 1.0, _SAMPLE_S, 0)) / _SAMPLE_S


def _fitting(kind: Kind, per_s: float, duration_s: float, drive: int) -> list[TracedRequest]:
    """Without the prompts that are longer than the profiles."""
    chunks = _traffic(kind, per_s).chunks(np.random.default_rng(drive))
    first_block = drive * _BLOCKS_OF_A_DRIVE
    return [
        replace(each, block_ids=tuple(first_block + block for block in each.block_ids))
        for each in take(chunks, until_s=duration_s)
        if each.input_tokens <= HIGH_TOKENS
    ]


def planned_lengths(kind: Kind) -> dict[str, Any]:
    """What there is to prefill of a prompt, as a deployment file writes it: with an endless cache, if turns begin
    alike."""
    if kind == "independent":
        return {
            "distribution": "lognormal",
            "mu": LOG_MEDIAN,
            "sigma": LOG_SIGMA,
            "low": LOW_TOKENS,
            "high": HIGH_TOKENS,
        }
    uncached = np.clip(sample_of(kind).uncached_tokens(), SHORTEST_TOKENS, HIGH_TOKENS)
    return {"distribution": "empirical", "lengths": uncached.tolist()}


def sample_of(kind: Kind) -> RequestTrace:
    """What a plan is made of."""
    return RequestTrace.of(kind, requests_at(kind, 1.0, _SAMPLE_S, 0), "tokens")


def chunk_of(requests: Sequence[TracedRequest]) -> RequestChunk:
    """The same for the simulator."""
    counts = np.array([len(each.block_ids) for each in requests])
    return RequestChunk(
        np.array([each.arrival_s for each in requests]),
        np.array([each.input_tokens for each in requests]),
        np.array([each.output_tokens for each in requests]),
        np.array([block for each in requests for block in each.block_ids], dtype=np.int64),
        starts_of(counts),
        BLOCK_TOKENS,
    )


def _traffic(kind: Kind, per_s: float) -> Traffic:
    answers = Uniform(LOW_ANSWER, HIGH_ANSWER)
    if kind == "independent":
        lengths = TruncatedLogNormal(LOG_MEDIAN, LOG_SIGMA, LOW_TOKENS, HIGH_TOKENS)
        return IndependentTraffic(Poisson(per_s), lengths, answers, BLOCK_TOKENS)
    questions = TruncatedLogNormal(_TURN_LOG_MEDIAN, LOG_SIGMA, LOW_TOKENS / 2, HIGH_TOKENS / 2)
    return SessionTraffic(
        Poisson(per_s / _MEAN_TURNS), _MEAN_TURNS, _THINK_S, questions, answers, block_tokens=BLOCK_TOKENS
    )
