"""In which order vLLM's runners call the connector in a step, whether layers tell of themselves or a graph is replayed.

The connector leaves vLLM its CUDA graphs, since each step ends with `wait_for_save`, before the orders are cleared.
"""

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.config.vllm import OPTIMIZATION_LEVEL_02
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.worker import gpu_model_runner, kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import kv_connector as kv_connector_v2
from vllm.v1.worker.gpu import model_runner as model_runner_v2

from prfaas.serving.engines.vllm.connector import PrfaasConnector, current_platform
from prfaas.serving.engines.vllm.metadata import TransferMetadata

ORDERS = SimpleNamespace(
    kv_connector_metadata=TransferMetadata(), has_sync_kv_loads=False, finished_req_ids=set()
)


class Told(KVConnectorBase_V1):
    """A connector that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "calls" or name.startswith("__"):
            return object.__getattribute__(self, name)
        return lambda *_, **__: (
            self.calls.append(name)
            or SimpleNamespace(finished_sending=None, finished_recving=None, failed_recving=None)
        )


Told.__abstractmethods__ = frozenset()


def check(calls: list[str]) -> None:
    """No hook came; the step ended all the same, with its orders."""
    assert "save_kv_layer" not in calls
    assert calls.index("bind_connector_metadata") < calls.index("wait_for_save")
    assert calls.index("wait_for_save") < calls.index("clear_connector_metadata")


@pytest.mark.parametrize("drafts", [False, True])
def test_the_first_runner_ends_a_step_without_hooks(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    for name, value in {
        "get_kv_transfer_group": lambda: told,
        "has_kv_transfer_group": lambda: True,
        "get_forward_context": lambda: None,
    }.items():
        monkeypatch.setattr(kv_connector_model_runner_mixin, name, value)
    runner: Any = kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin
    with runner._get_kv_connector_output(ORDERS, defer_finalize=drafts):
        pass
    if drafts:
        # The drafter writes the KV of its own layers first.
        assert "wait_for_save" not in told.calls
        runner.finalize_kv_connector()
    check(told.calls)


def test_the_second_runner_ends_a_step_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    active: Any = object.__new__(kv_connector_v2.ActiveKVConnector)
    active.kv_connector, active._disabled, active._pending_load_kwargs = told, False, None
    monkeypatch.setattr(kv_connector_v2, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(kv_connector_v2, "get_forward_context", lambda: None)
    active.pre_forward(ORDERS)
    active.finish_forward()
    active.post_forward(set())
    check(told.calls)


def calls_of(function: Any) -> list[str]:
    """Names of methods that a function of vLLM calls, in the order of its source."""
    tree = ast.parse(
        inspect.getsource(function).lstrip() if inspect.isclass(function) else _dedented(function)
    )
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(node.func) for node in nodes]


def _dedented(function: Any) -> str:
    return inspect.cleandoc("\n" + inspect.getsource(function))


def test_whole_graphs_are_run_between_the_two() -> None:
    """The second runner begins both, a graph and the model, with the orders; to the first one both are one call."""
    second = calls_of(inspect.unwrap(model_runner_v2.GPUModelRunner.execute_model))
    graph = second.index("self.cudagraph_manager.run_fullgraph")
    begins = [place for place, name in enumerate(second) if name == "self.kv_connector.pre_forward"]
    assert begins[0] < graph < begins[1] < second.index("self.model")
    assert "self.kv_connector.post_forward" in calls_of(
        inspect.unwrap(model_runner_v2.GPUModelRunner.sample_tokens)
    )
    first = calls_of(inspect.unwrap(gpu_model_runner.GPUModelRunner.execute_model))
    assert first.index("self.maybe_get_kv_connector_output") < first.index("self._model_forward")
    assert "self.finalize_kv_connector" in calls_of(
        inspect.unwrap(gpu_model_runner.GPUModelRunner.sample_tokens)
    )


def test_prefill_batches_are_piecewise_by_default_and_the_connector_leaves_it_so() -> None:
    assert not PrfaasConnector.requires_piecewise_for_cudagraph({})
    mode = OPTIMIZATION_LEVEL_02["compilation_config"]["cudagraph_mode"]
    assert mode.decode_mode() is CUDAGraphMode.FULL and mode.mixed_mode() is CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("on_cpu", [False, True])
def test_only_engines_on_cpus_wait_in_idle_steps(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    connector: Any = object.__new__(PrfaasConnector)
    ranks = SimpleNamespace(data_parallel_size=1)
    connector._vllm_config = SimpleNamespace(parallel_config=ranks)
    connector._connector_metadata = TransferMetadata(is_idle=True)
    assert connector._is_idle() is on_cpu
    # The other ranks of a group would wait too.
    ranks.data_parallel_size = 2
    assert not connector._is_idle()
    ranks.data_parallel_size = 1
    connector._connector_metadata = TransferMetadata()
    assert not connector._is_idle()
