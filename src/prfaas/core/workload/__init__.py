"""The traffic: how long prompts and answers are, as formulas or from traces."""

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
from prfaas.core.workload.requests import RequestTrace, TracedRequest, read_requests, write_requests
from prfaas.core.workload.trace_columns import TraceColumns, TraceFormat

__all__ = [
    "EDGE",
    "Bins",
    "Empirical",
    "LengthDistribution",
    "RequestTrace",
    "TraceColumns",
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
    "write_requests",
]
