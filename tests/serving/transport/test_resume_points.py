from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.transport.protocol.resume_points import ResumePoints, common
from prfaas.serving.transport.protocol.wire import TransferPhase, TransferStatus, body_of, read_body


def points_of(ends: list[int]) -> ResumePoints:
    return ResumePoints(max(ends), tuple(sorted(set(ends)))) if ends else ResumePoints()


ENDS = st.lists(st.integers(1, 40), max_size=5).map(points_of)
ANY = st.one_of(ENDS, st.integers(0, 40).map(ResumePoints))


@given(st.lists(ANY, min_size=1, max_size=4), st.integers(1, 60))
def test_all_can_go_on_from_what_they_have_in_common(parts: list[ResumePoints], tokens: int) -> None:
    """Exactly there: nothing is allowed that one lacks, and nothing is lost that all have."""
    assert common(parts).allows(tokens) == all(part.allows(tokens) for part in parts)


@given(st.lists(ANY, min_size=2, max_size=3))
def test_the_order_does_not_matter(parts: list[ResumePoints]) -> None:
    assert common(parts) == common(parts[::-1])


@given(ANY, st.integers(1, 8), st.integers(0, 20), st.integers(1, 60))
def test_only_where_blocks_end(points: ResumePoints, block: int, skip: int, tokens: int) -> None:
    inside = points.in_blocks(block, skip)
    if tokens % block == 0 and tokens > skip:
        assert inside.allows(tokens) == points.allows(tokens)
    assert inside.tokens % block == 0 and (inside.tokens > skip or not inside.tokens)


@given(ENDS)
def test_a_status_tells_them(points: ResumePoints) -> None:
    status = TransferStatus(
        TransferPhase.FAILED, "", 0, 0, 0, 50, 0, usable_tokens=points.tokens, usable_ends=points.ends
    )
    assert read_body(TransferStatus, body_of(status)).resume_points == points
