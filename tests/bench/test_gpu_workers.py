"""bench/gpu/workers.py where there is no GPU: its own path, in host memory."""

import pytest
import torch
import workers

from prfaas.serving.engines.vllm.device_pages import DevicePages

pytestmark = pytest.mark.slow("imports vLLM")

CPU = torch.device("cpu")
TOKENS = 150


@pytest.fixture(autouse=True)
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LAYERS", ("layer.0", "layer.1"))


def test_what_arrives_is_what_was_computed() -> None:
    found = workers.check(CPU, TOKENS)
    assert [each.kind for each in found if not each.is_exact] == []
    assert len(found) == len(workers.PAIRS) + 1


def test_a_page_in_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    load = DevicePages.load_from

    def turned(self: DevicePages, places: workers.ArenaPages, start: int) -> None:
        load(self, workers.ArenaPages(places.arena, places.blocks[::-1], places.offsets), start)

    monkeypatch.setattr(DevicePages, "load_from", turned)
    assert not workers.pool_pages(TOKENS, CPU).is_exact
