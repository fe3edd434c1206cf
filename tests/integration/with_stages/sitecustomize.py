"""Python runs this at its start in engines that have the folder on their path: stages of a pipeline on CPUs.

What a stage gets from the one before it is put into tensors that vLLM makes when it warms up, which it does not on CPUs
with an eager model and a set size of the KV cache.
"""

from typing import Any

from changing import change_modules, run_next


def _received_tensors(module: Any) -> None:
    load_model = module.CPUModelRunner.load_model

    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed import get_pp_group

        result = load_model(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device
            )
        return result

    module.CPUModelRunner.load_model = loaded


# Workers are started otherwise than engines: every Python is changed, which costs nothing until vLLM comes.
change_modules({"vllm.v1.worker.cpu_model_runner": _received_tensors})
run_next(__file__)
