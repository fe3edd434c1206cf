"""What went into an engine's block hashes besides the tokens."""

from prfaas.cache.events import StoredBlocks


def plain_blocks(event: StoredBlocks) -> tuple[str, int]:
    """The salt of a chain that begins with `event`, and how many leading blocks are known by their tokens alone.

    Multimodal parts and prompt embeddings are not in the token ids: such blocks, and all after them, can't be
    told apart by these.
    """
    keys = event.extra_keys
    if not keys or keys.count(None) == len(keys):
        return "", len(event.hashes)
    salt = ""
    for place, of_block in enumerate(keys):
        rest = list(of_block or ())
        if event.adapter and rest[:1] == [event.adapter]:
            del rest[0]
        if place == 0 and event.parent is None and rest and isinstance(rest[0], str):
            salt = rest.pop(0)
        if rest:
            return salt, place
    return salt, len(event.hashes)
