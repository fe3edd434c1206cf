"""The command line that starts stand-in engines in a process of their own."""

import sys
from collections.abc import Sequence

from prfaas.core.deployment import Deployment
from prfaas.serving.engines.vllm.command import EngineCommand


def synthetic_command(deployment: Deployment, names: Sequence[str]) -> EngineCommand:
    """How to start the instances `names` of `deployment`, all in one process."""
    argv = [
        *(sys.executable, "-m", "prfaas.serving.engines.synthetic"),
        *("--state-dir", str(deployment.state_dir)),
        str(deployment.path.absolute()),
        *names,
    ]
    return EngineCommand(tuple(argv), {})
