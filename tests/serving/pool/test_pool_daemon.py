"""Engines and tools at the daemon's socket."""

from pathlib import Path

from prfaas.core.pool.keys import page_id
from prfaas.serving.pool.page_table import PageState

from .pool_daemon import (
    HYBRID,
    TENANT,
    chain_of,
    connected,
    packed_chain,
    pages_of,
    part_of,
    pool_options,
    read_part,
    running_daemon,
    store_prompt,
)

PROMPT = list(range(1, 257))


def test_a_prompt_that_was_stored_is_found_by_another_engine(tmp_path: Path) -> None:
    options = pool_options(tmp_path)
    with running_daemon(options), connected(options) as first, connected(options) as second:
        assert store_prompt(first, PROMPT) == len(pages_of(HYBRID, PROMPT))
        keys = chain_of(HYBRID, PROMPT)
        match = second.match(packed_chain(keys), 0, 255, whole=True, tenant=TENANT, pin=True)
        assert match is not None
        assert (match.usable_tokens, match.attention_tokens, match.memory_tokens) == (224, 224, 224)
        assert [(group, first, len(refs)) for group, first, refs in match.pages] == [
            (0, 0, 7),
            (1, 6, 1),
            (2, 11, 3),
        ]
        for group, first_block, refs in match.pages:
            block_tokens = HYBRID.group(group).block_tokens
            for block, ref in enumerate(refs, first_block):
                page = page_id(keys.key_at((block + 1) * block_tokens), group)
                assert second.page_state(ref.slot) is PageState.READY
                assert read_part(second, ref, group) == part_of(HYBRID, page)
        assert second.intact(match.epoch, [ref for pages in match.pages for ref in pages.refs])
        second.unpin(match.pin)
