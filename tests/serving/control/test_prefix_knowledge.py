"""What may be believed of whom: events for everything, expectations for choosing, the record where there is no more."""

import pytest

from prfaas.core.prefix.digests import EventDigests
from prfaas.core.prefix.events import StoredBlocks
from prfaas.core.prefix.index import GlobalIndex, PrefixHit
from prfaas.core.scheduling.decision import CacheTransfer
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge

from .world import BYTES_PER_TOKEN, FakeClock, decision, kv_facts

SEED = 7


@pytest.fixture
def holdings(cluster_state: ClusterState) -> PrefixKnowledge:
    return PrefixKnowledge(GlobalIndex(seed=SEED), cluster_state)


def tell(holdings: PrefixKnowledge, name: str, tokens: int, block: int = 16) -> None:
    hashes: list[int | bytes] = list(range(1, tokens // block + 1))
    event = StoredBlocks(
        hashes=hashes, block_tokens=block, token_ids=list(range(tokens)), group=0, kind="full_attention"
    )
    holdings.apply(name, EventDigests(SEED).of([event]))


def test_events_prove_and_expectations_only_guide(holdings: PrefixKnowledge, clock: FakeClock) -> None:
    tell(holdings, "far-0", 32)
    chains = holdings.chains(range(65), "", "")
    holdings.expect("home-d0", chains)
    holdings.expect("home-p0", chains)
    belief = holdings.match(chains)
    # What decodes was only sent attention blocks and the state at the very end.
    assert belief.held == {
        "far-0": PrefixHit(32, 32),
        "home-d0": PrefixHit(0, 64),
        "home-p0": PrefixHit(64, 64),
    }
    assert belief.proven == {"far-0": PrefixHit(32, 32)}
    clock.now_s += 60
    assert holdings.match(chains).held == {"far-0": PrefixHit(32, 32)}


def test_bytes_are_left_out_only_when_proven(holdings: PrefixKnowledge) -> None:
    tell(holdings, "home-d0", 32)
    chains = holdings.chains(range(65), "", "")
    for name in ("home-d0", "far-0"):
        holdings.expect(name, chains)
    belief = holdings.match(chains)
    transfer = CacheTransfer("home-p0", 60, 48, 12 * BYTES_PER_TOKEN)
    what = decision("far-0", "home-d0", skip_tokens=64, cache_transfer=transfer)
    bounded = belief.bound(what, 1001, lambda *_: kv_facts())
    assert (bounded.skip_tokens, bounded.kv_bytes) == (32, (1000 - 32) * BYTES_PER_TOKEN)
    assert bounded.cache_transfer == CacheTransfer("home-p0", 60, 0, 60 * BYTES_PER_TOKEN)
    fine = decision("far-0", "home-d0", skip_tokens=16)
    assert belief.bound(fine, 1001, lambda *_: kv_facts()) is fine


@pytest.mark.parametrize(("told", "own"), [(3, 3), (1, 1), (None, 1), (0, 1), (True, 1), ("3", 1), (65, 1)])
def test_an_engine_tells_how_many_last_tokens_it_computes_itself(
    holdings: PrefixKnowledge, told: object, own: int
) -> None:
    assert holdings.own_last_tokens("home-d0") == 1
    holdings.learn_stats("home-d0", {"own_last_tokens": told})
    assert (holdings.own_last_tokens("home-d0"), holdings.own_last_tokens("far-0")) == (own, 1)


def test_a_block_less_is_proven_of_an_engine_that_computes_the_last_one_anew(
    holdings: PrefixKnowledge,
) -> None:
    holdings.learn_stats("home-d0", {"drops_last_block": True})
    holdings.learn_stats("far-0", {})
    for name in ("home-d0", "far-0", "home-p0"):
        tell(holdings, name, 48)
    holdings.learn_stats("home-p0", {"drops_last_block": True})
    chains = holdings.chains(range(65), "", "")
    less, whole = PrefixHit(32, 32), PrefixHit(48, 48)
    assert holdings.match(chains).proven == {"home-d0": less, "far-0": whole, "home-p0": less}
    holdings.learn_stats("home-d0", {"drops_last_block": False})
    assert holdings.match(chains).proven["home-d0"] == whole


def test_tenants_and_adapters_share_nothing(holdings: PrefixKnowledge) -> None:
    tell(holdings, "far-0", 32)
    assert holdings.match(holdings.chains(range(65), "salt", "")).held == {}
    assert holdings.match(holdings.chains(range(65), "", "lora")).held == {}
    assert holdings.match(holdings.chains(range(65), "", "")).held != {}


def test_a_dropped_instance_holds_nothing(holdings: PrefixKnowledge) -> None:
    tell(holdings, "far-0", 32)
    chains = holdings.chains(range(65), "", "")
    holdings.expect("far-0", chains)
    holdings.drop("far-0", "died")
    assert holdings.match(chains).held == {}
    assert (holdings.blocks("far-0"), holdings.state(0.0)["index"]["expected_blocks"]) == (0, 4)


def test_what_is_forgotten_is_told_once(holdings: PrefixKnowledge, caplog: pytest.LogCaptureFixture) -> None:
    """Not by every request that is refused while an engine is gone."""
    caplog.set_level("INFO")
    for _ in range(2):
        tell(holdings, "far-0", 32)
        for _ in range(3):
            holdings.drop("far-0", "died")
    assert [record.getMessage() for record in caplog.records] == ["what far-0 holds is forgotten: died"] * 2
