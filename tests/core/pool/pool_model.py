"""A pool as a dict: which pages of a few prompts are in which tier, and what is usable of them."""

import random
from collections.abc import Sequence

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PageGroup, PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KeyChain, page_id
from prfaas.core.prefix.index import PrefixHit

BLOCK = 16
WINDOW = 40


def geometry(*, hybrid: bool = True, fingerprint: str = "model") -> PoolGeometry:
    """Full attention alone, or with two groups of linear states and a window too."""
    groups = [PageGroup(0, GroupKind.FULL, BLOCK, 0, 64)]
    if hybrid:
        groups.append(PageGroup(1, GroupKind.STATE, 2 * BLOCK, 0, 64))
        groups.append(PageGroup(2, GroupKind.WINDOW, BLOCK, WINDOW, 64))
        groups.append(PageGroup(3, GroupKind.STATE, 2 * BLOCK, 0, 64))
    return PoolGeometry(fingerprint, 1, tuple(groups))


class Prompt:
    """A prompt's tokens, and its pages."""

    def __init__(
        self, token_ids: Sequence[int], shape: PoolGeometry, salt: str = "", adapter: str = ""
    ) -> None:
        self.token_ids, self.salt, self.adapter = list(token_ids), salt, adapter
        chain = KeyChain(BLOCK, salt, adapter)
        chain.extend(self.token_ids)
        self.keys = chain.keys
        self.pages: list[tuple[bytes, PageIdentity | None]] = []
        for place, key in enumerate(self.keys):
            block = self.token_ids[place * BLOCK : (place + 1) * BLOCK]
            ids = b"".join(token.to_bytes(4, "little") for token in block)
            parent = self.keys[place - 1] if place else b""
            for group in shape.groups:
                if (place + 1) * BLOCK % group.block_tokens == 0:
                    identity = PageIdentity(parent, ids, salt, adapter) if group is shape.lead else None
                    self.pages.append((page_id(key, group.index), identity))


def prompts(chance: random.Random, shape: PoolGeometry, count: int = 4) -> list[Prompt]:
    """Prompts that share beginnings, some under a salt or an adapter."""
    base = [chance.randrange(50) for _ in range(12 * BLOCK)]
    found = []
    for _ in range(count):
        shared = chance.randrange(0, 10) * BLOCK
        own = [chance.randrange(50) for _ in range(chance.randrange(1, 6) * BLOCK + 1)]
        who = chance.choice(["", "", "tenant"])
        adapter = chance.choice(["", "", "adapter"])
        found.append(Prompt(base[:shared] + own, shape, who, adapter))
    return found


def held(pages: set[bytes], prompt: Prompt, shape: PoolGeometry) -> PrefixHit:
    """What is usable of a prompt less its last token, given the pages that are held."""
    most = (len(prompt.token_ids) - 1) // BLOCK
    attention = 0
    while attention < most and page_id(prompt.keys[attention], 0) in pages:
        attention += 1
    reusable = next((end for end in range(attention, 0, -1) if _usable(pages, prompt, shape, end)), 0)
    return PrefixHit(reusable * BLOCK, attention * BLOCK)


def _usable(pages: set[bytes], prompt: Prompt, shape: PoolGeometry, end: int) -> bool:
    for group in shape.groups:
        match group.kind:
            case GroupKind.STATE:
                ends = [end]
            case GroupKind.WINDOW:
                needed = -(-(WINDOW - 1) // BLOCK)
                ends = list(range(max(end - needed, 0) + 1, end + 1))
            case GroupKind.FULL:
                ends = []
        if any(
            each * BLOCK % group.block_tokens or page_id(prompt.keys[each - 1], group.index) not in pages
            for each in ends
        ):
            return False
    return True
