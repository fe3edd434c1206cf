"""What is wrong with a workload, in one sentence."""


class WorkloadError(ValueError):
    """A distribution that can't be, or a trace that can't be read (then with file and line)."""
