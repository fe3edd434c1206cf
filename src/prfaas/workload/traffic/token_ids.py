"""Prompts from block ids: the same tokens wherever the same block stands."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prfaas.workload.errors import WorkloadError

# SplitMix64's constants: consecutive seeds give unrelated numbers.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LARGEST_VOCABULARY = 1 << 31


def prompt_ids(
    block_ids: "Sequence[int] | NDArray[np.int64]",
    block_tokens: int,
    num_tokens: int,
    vocabulary_size: int,
    first_id: int = 0,
) -> NDArray[np.int32]:
    """The first `num_tokens` tokens of these blocks of `block_tokens` tokens, as ids from `first_id` on.

    Each token is a function of its block's id and of its place in the block alone, and about evenly spread over
    the `vocabulary_size` ids: the same in every process and version of numpy. 128K tokens take about a millisecond.

    Raises:
        WorkloadError: the blocks don't have so many tokens, or the vocabulary has fewer than 2 ids or too many.
    """
    if not 0 <= num_tokens <= len(block_ids) * block_tokens:
        raise WorkloadError(f"{len(block_ids)} blocks of {block_tokens} tokens have no {num_tokens} tokens")
    if not (vocabulary_size >= 2 and 0 <= first_id <= _LARGEST_VOCABULARY - vocabulary_size):
        raise WorkloadError(
            f"a vocabulary has 2 to 2^31 ids from 0 on, not {vocabulary_size} from {first_id} on"
        )
    seeds = _mixed(np.asarray(block_ids, dtype=np.int64).astype(np.uint64) * _STEP + _STEP)
    words = seeds[:, None] + np.arange(block_tokens, dtype=np.uint64) * _STEP
    # One round suffices after a seed that is well mixed itself.
    words ^= words >> _HALF
    words *= _FIRST
    words >>= _HALF
    words *= np.uint64(vocabulary_size)
    words >>= _HALF
    return words.reshape(-1)[:num_tokens].astype(np.int32) + np.int32(first_id)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
