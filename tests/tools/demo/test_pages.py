"""Explaining moved bytes by the engine's pages."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.tools.demo.compare import MovedPages, Pages, find_pages

DENSE = KvModel("dense", (FullAttention(6, 4, 64, 64),))
LINEAR = KvModel("linear", (FullAttention(2, 2, 64, 64), LinearState(6, 3072, 65536)))
WINDOW = KvModel("window", (FullAttention(1, 2, 64, 64), SlidingWindow(5, 4, 64, 64, 128)))
SIZES = st.sampled_from([16, 64, 128, 256])


def test_the_linear_state_is_never_rounded() -> None:
    assert Pages(256, 256).bytes_to_move(LINEAR, 99, 0) == 256 * 1024 + 6 * 68608


@given(
    st.sampled_from([DENSE, LINEAR, WINDOW]),
    SIZES,
    SIZES,
    st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
)
def test_found_pages_explain_every_transfer(
    model: KvModel, full: int, window: int, lengths: list[int]
) -> None:
    pages = Pages(full, window if model is WINDOW else full)
    transfers = [MovedPages(n, n // 3, pages.bytes_to_move(model, n, n // 3)) for n in lengths]
    found = find_pages(model, transfers)
    assert found is not None
    assert all(found.bytes_to_move(model, t.num_tokens, t.skip_tokens) == t.kv_bytes for t in transfers)


@given(st.sampled_from([DENSE, LINEAR, WINDOW]), st.integers(1, 20_000), st.integers(1, 63))
def test_a_few_bytes_too_many_are_not_explained(model: KvModel, tokens: int, extra_bytes: int) -> None:
    moved_bytes = model.bytes_to_move(tokens) + extra_bytes
    assert find_pages(model, [MovedPages(tokens, 0, moved_bytes)]) is None


def test_one_page_size_must_explain_all_rows() -> None:
    small, large = (Pages(size, size).bytes_to_move(DENSE, 100, 0) for size in (128, 256))
    assert find_pages(DENSE, [MovedPages(100, 0, small)]) is not None
    assert find_pages(DENSE, [MovedPages(100, 0, large)]) is not None
    assert find_pages(DENSE, [MovedPages(100, 0, small), MovedPages(100, 0, large)]) is None
