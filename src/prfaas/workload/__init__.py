"""The traffic: how long prompts and answers are, as formulas or from traces."""

from prfaas.workload.empirical import Empirical, fixed
from prfaas.workload.errors import WorkloadError
from prfaas.workload.lengths import Bins, LengthDistribution
from prfaas.workload.log_normal import TruncatedLogNormal
from prfaas.workload.request_files import read_requests, write_requests
from prfaas.workload.requests import RequestTrace, TracedRequest
from prfaas.workload.trace import Trace, TraceRequest
from prfaas.workload.traces import TraceFormat, read_trace
from prfaas.workload.uniform import Uniform
from prfaas.workload.workload import Workload

__all__ = [
    "Bins",
    "Empirical",
    "LengthDistribution",
    "RequestTrace",
    "Trace",
    "TraceFormat",
    "TraceRequest",
    "TracedRequest",
    "TruncatedLogNormal",
    "Uniform",
    "Workload",
    "WorkloadError",
    "fixed",
    "read_requests",
    "read_trace",
    "write_requests",
]
