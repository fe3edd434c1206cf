"""The traffic: how long prompts and answers are, as formulas or from traces."""

from prfaas.core.workload.csv_traces import CsvColumns
from prfaas.core.workload.empirical import Empirical, divisible, edge_factor, fixed
from prfaas.core.workload.lengths import (
    EDGE,
    Bins,
    LengthDistribution,
    TruncatedLogNormal,
    Uniform,
    Workload,
    WorkloadError,
)
from prfaas.core.workload.requests import (
    RequestTrace,
    TracedRequest,
    TraceFormat,
    read_requests,
    write_requests,
)
from prfaas.core.workload.trace_readers import read_trace

__all__ = [
    "EDGE",
    "Bins",
    "CsvColumns",
    "Empirical",
    "LengthDistribution",
    "RequestTrace",
    "TraceFormat",
    "TracedRequest",
    "TruncatedLogNormal",
    "Uniform",
    "Workload",
    "WorkloadError",
    "divisible",
    "edge_factor",
    "fixed",
    "read_requests",
    "read_trace",
    "write_requests",
]
