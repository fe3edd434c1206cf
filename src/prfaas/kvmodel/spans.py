"""Which whole blocks hold a span of tokens."""


def check_span(num_tokens: int, skip_tokens: int, block_tokens: int) -> None:
    """Refuse a transfer that can't be.

    Raises:
        ValueError: not 0 <= skip_tokens <= num_tokens, or a block of less than one token.
    """
    if not 0 <= skip_tokens <= num_tokens:
        raise ValueError(
            f"KV of tokens [{skip_tokens}, {num_tokens}) can't be moved: need 0 <= skip <= number of tokens"
        )
    if block_tokens < 1:
        raise ValueError(f"a block holds at least one token, not {block_tokens}")


def tokens_in_blocks(start: int, end: int, block_tokens: int) -> int:
    """Tokens of room in the blocks that hold positions [start, end), none if it is empty and aligned."""
    return (-(-end // block_tokens) - start // block_tokens) * block_tokens


def heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank: divided among the ranks, or repeated where there are fewer heads than ranks.

    Raises:
        ValueError: neither number divides the other, so the ranks would differ.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ValueError(f"{kv_heads} KV heads can't be divided among {tensor_parallel} ranks")
    return max(1, kv_heads // tensor_parallel)
