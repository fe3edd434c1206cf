"""What a producer hands over to a reader by NIXL: sealed, and tied to one ticket."""

import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.handover import (
    MAX_HANDOVER_CHARS,
    Handover,
    HandoverError,
    by_nixl,
    is_by_nixl,
    ticket_of,
)
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket

KEY = secrets.token_bytes(32)
PARAMS = {"do_remote_prefill": True, "remote_host": "h", "remote_block_ids": [[1, 2], [3]], "remote_port": 5}


def ticket() -> str:
    fields: dict[str, Any] = {"producer": "p", "consumer": "c", "num_tokens": 9, "skip_tokens": 0}
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        **fields,
        prompt_digest=bytes(16),
        expires_at_s=60,
    ).seal(KEY)


@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.integers(0, 1 << 40) | st.text() | st.none() | st.booleans(), st.lists, max_leaves=8),
        max_size=4,
    )
)
def test_what_is_sealed_comes_back(params: dict[str, Any]) -> None:
    sealed = ticket()
    told = Handover(sealed, params, 5.5).seal(KEY)
    assert is_by_nixl(told) and ticket_of(told) == sealed
    assert Handover.unseal(told, KEY) == Handover(sealed, params, 5.5)


def test_a_ticket_of_ours_is_not_one_for_nixl() -> None:
    sealed = ticket()
    assert not is_by_nixl(sealed)
    assert is_by_nixl(by_nixl(sealed)) and ticket_of(by_nixl(sealed)) == sealed


@given(place=st.integers(0), bit=st.integers(0, 6))
def test_no_character_can_be_changed(place: int, bit: int) -> None:
    told = Handover(ticket(), PARAMS, 5.5).seal(KEY)
    at = len("nixl.") + place % (len(told) - len("nixl."))
    changed = told[:at] + chr(ord(told[at]) ^ (1 << bit)) + told[at + 1 :]
    try:
        opened = Handover.unseal(changed, KEY)
    except (HandoverError, UnicodeError):
        return
    # The last character of base64 has bits that say nothing.
    assert opened == Handover.unseal(told, KEY) and at == len(told) - 1


def test_one_tickets_handover_is_not_anothers() -> None:
    told, other = Handover(ticket(), PARAMS, 5.5).seal(KEY), ticket()
    with pytest.raises(HandoverError, match="not sealed with this deployment's key"):
        Handover.unseal(told.replace(ticket_of(told), other), KEY)


@pytest.mark.parametrize("text", ["nixl.", "nixl.abc", "nixl.abc.", "nixl.abc.ä", "nixl.abc.AAAA"])
def test_what_is_no_handover_is_refused(text: str) -> None:
    with pytest.raises(HandoverError):
        Handover.unseal(text, KEY)


def test_another_key_and_too_much_are_refused() -> None:
    told = Handover(ticket(), PARAMS, 5.5).seal(KEY)
    with pytest.raises(HandoverError, match="key"):
        Handover.unseal(told, secrets.token_bytes(32))
    with pytest.raises(HandoverError, match="characters"):
        Handover.unseal("nixl.t." + "A" * MAX_HANDOVER_CHARS, KEY)
