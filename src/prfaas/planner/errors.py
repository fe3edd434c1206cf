"""What can't be planned, in one sentence."""


class PlanError(ValueError):
    """The planner was given something that has no plan: no decode cluster, nothing that can prefill, …"""
