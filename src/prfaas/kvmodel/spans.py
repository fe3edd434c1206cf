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
