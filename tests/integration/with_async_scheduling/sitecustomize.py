"""Python runs this at its start in engines that have the folder on their path: they schedule a step ahead, as on GPUs.

vLLM switches that off on CPUs, where nothing is gained. It needs the model runner of GPUs (`with_triton`).
"""

from typing import Any

from changing import change_modules, is_engine, run_next


def _ahead(module: Any) -> None:
    platform = module.CpuPlatform
    usual = platform.check_and_update_config

    def check_and_update_config(_: Any, vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def _told(module: Any) -> None:
    scheduler = module.AsyncScheduler
    schedule = scheduler.schedule

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        print("schedules a step ahead", flush=True)
        scheduler.schedule = schedule
        return schedule(self, *args, **kwargs)

    scheduler.schedule = told


if is_engine():
    change_modules({"vllm.platforms.cpu": _ahead, "vllm.v1.core.sched.async_scheduler": _told})
    run_next(__file__)
