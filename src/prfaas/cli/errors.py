"""Errors that end a command with one sentence and exit code 2."""


class CliError(Exception):
    """A command can't do what it was asked to; the text says why and what to do."""


# Heavy libraries that are only there with an engine installed.
_ENGINE_MODULES = {"vllm", "torch", "transformers", "safetensors"}


def sentence(error: Exception) -> str | None:
    """What to tell the user about an error that they can mend; None for one of ours."""
    # Late, so that `prfaas --help` doesn't pay for what it doesn't need.
    from prfaas.deployment import DeploymentError
    from prfaas.engines.errors import EngineError
    from prfaas.kvmodel import ConfigError
    from prfaas.planner import PlanError
    from prfaas.profiles import ProfileError
    from prfaas.transport.keyfile import KeyFileError
    from prfaas.workload import WorkloadError

    known = (CliError, DeploymentError, EngineError, ConfigError, PlanError, ProfileError, KeyFileError)
    if isinstance(error, (*known, WorkloadError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _ENGINE_MODULES:
        return (
            f"{error.name} is not installed in this environment; "
            "`make setup` installs vLLM's CPU build, `pip install 'prfaas[engine]'` the one for GPUs"
        )
    return None
