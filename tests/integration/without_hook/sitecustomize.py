"""Python runs this at its start in engines that have the folder on their path: no layer of attention calls the hook."""

from changing import change_modules, is_engine, run_next


def _say_nothing(module: object) -> None:
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        setattr(module.PrfaasConnector, hook, lambda *_, **__: None)  # type: ignore[attr-defined]


if is_engine():
    change_modules({"prfaas.serving.engines.vllm.connector": _say_nothing})
    run_next(__file__)
