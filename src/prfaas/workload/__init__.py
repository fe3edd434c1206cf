"""The traffic: how long prompts and answers are, as formulas or from traces."""

from prfaas.workload.empirical import Empirical, fixed
from prfaas.workload.errors import WorkloadError
from prfaas.workload.lengths import Bins, LengthDistribution
from prfaas.workload.log_normal import TruncatedLogNormal
from prfaas.workload.trace import Trace, TraceRequest
from prfaas.workload.traces import TraceFormat, read_trace
from prfaas.workload.uniform import Uniform
from prfaas.workload.workload import Workload

__all__ = [
    "Bins",
    "Empirical",
    "LengthDistribution",
    "Trace",
    "TraceFormat",
    "TraceRequest",
    "TruncatedLogNormal",
    "Uniform",
    "Workload",
    "WorkloadError",
    "fixed",
    "read_trace",
]
