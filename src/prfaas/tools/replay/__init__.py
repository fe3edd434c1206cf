"""Traffic against a running endpoint: recorded or made-up requests at their times, and what became of each."""

from prfaas.tools.replay.client import ReplayedRequest, ReplayError, ReplayOptions, Target, find_target
from prfaas.tools.replay.replayer import replay
from prfaas.tools.replay.result import ReplayResult

__all__ = [
    "ReplayError",
    "ReplayOptions",
    "ReplayResult",
    "ReplayedRequest",
    "Target",
    "find_target",
    "replay",
]
