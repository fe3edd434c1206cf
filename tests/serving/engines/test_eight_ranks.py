"""examples/eight-ranks.yaml: plan, simulator, gateway and what stand-ins send agree on the bytes of a request."""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import yaml
from synthetic_world import free_ports, random_ids, running
from tests.lab.simulator.conftest import chunk_of
from tests.lab.simulator.invariants import Invariants
from tests.ports import neighbours

from prfaas.core.deployment import Deployment, load_deployment, load_planned
from prfaas.core.planner import problem_of
from prfaas.core.route_header import RouteHeader
from prfaas.lab.simulator.scenario import scenario_of
from prfaas.lab.simulator.simulation import simulate
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.control.planning_inputs import kv_model_of, prefill_curves, view_of
from prfaas.serving.live import serve_live
from prfaas.serving.secret_files import create_key

EXAMPLES = Path(__file__).parents[3] / "examples"
FILE = EXAMPLES / "eight-ranks.yaml"
# Whole blocks of stand-ins and of the largest that the gateway expects; the last token is computed at the decode.
TOKENS = 2048
# 4 layers of K and V of 2 heads of 32 in bf16, each of which four ranks keep.
ONCE_BYTES = TOKENS * 4 * 2 * 2 * 32 * 2
COPIES = 4


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """The example as it is but for its ports, and every prompt is offloaded."""
    document = yaml.safe_load(FILE.read_text())
    ports = iter(free_ports(20))
    for cluster in document["clusters"]:
        cluster["speedup"] = 200
        for instance in cluster["instances"]:
            instance["http_port"] = next(ports)
            # The file keeps a port for each rank, though a stand-in listens at the first alone.
            instance["kv_port"] = neighbours(instance["tensor_parallel"])
    document["gateway"] |= {"port": next(ports), "admin": {"port": next(ports)}}
    document["routing"] = {"policy": "offload_all"}
    for folder in ("two-heads", "stand-in"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(document))
    made = load_deployment(file, state_dir=tmp_path)
    create_key(made.security.key_file)
    CertificateFolder(made).make()
    return made


def test_the_plan_counts_every_byte_once() -> None:
    problem = problem_of(load_planned(FILE))
    (link,) = problem.links
    assert problem.kv_bytes_over(link.name)(np.array([float(TOKENS)])) == [ONCE_BYTES]


def test_the_simulator_sends_as_much() -> None:
    planned = load_planned(FILE)
    scenario = scenario_of(planned, policy="offload_all", adapts=False, allocation=False)
    result = simulate(scenario, [chunk_of([0.0], [TOKENS + 1])], warmup_share=0.0, on_event=Invariants())
    assert result.link_bytes[0] == ONCE_BYTES


def test_the_gateway_routes_by_as_much(deployment: Deployment) -> None:
    view = view_of(deployment, kv_model_of(deployment), prefill_curves(deployment), 0.0)
    for ends in (("east", "home"), ("home", "home")):
        assert view.kv_between(*ends).bytes_to_move(TOKENS + 1, 0) == ONCE_BYTES
    # A pool would keep the pages of all ranks.
    assert view.kv_of_pools("home").prefix_bytes_to_move(TOKENS, 0) == COPIES * ONCE_BYTES


@pytest.mark.slow("starts processes")
def test_stand_ins_send_as_much(deployment: Deployment) -> None:
    async def check() -> tuple[RouteHeader, int]:
        async with running(deployment) as world:
            port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
            try:
                async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{await port}") as http:
                    ids = random_ids(TOKENS + 1, 1)
                    asked = {"model": "two-heads", "prompt": ids, "max_tokens": 4}
                    async with http.post("/v1/completions", json=asked) as response:
                        assert response.status == 200, await response.text()
                        route = RouteHeader.parse(response.headers["x-prfaas-route"])
                    await world.settled()
                    return route, world.nodes["east-0"].engine.endpoints.counts["bytes_sent"]
            finally:
                gateway.cancel()
                with suppress(asyncio.CancelledError):
                    await gateway

    route, sent_bytes = asyncio.run(check())
    assert (route.route, route.prefill, route.decode) == ("offload", "east-0", "home-decode")
    assert route.kv_bytes == sent_bytes == ONCE_BYTES
