"""Traffic against a running endpoint: recorded or made-up requests at their times, and what became of each."""

from prfaas.replay.errors import ReplayError
from prfaas.replay.options import ReplayOptions
from prfaas.replay.record import RequestRecord
from prfaas.replay.replayer import replay
from prfaas.replay.result import ReplayResult
from prfaas.replay.target import Target, find_target

__all__ = [
    "ReplayError",
    "ReplayOptions",
    "ReplayResult",
    "RequestRecord",
    "Target",
    "find_target",
    "replay",
]
