"""Engines as child processes, under the name by which commands know them."""

from prfaas.engines.running import EngineProgress, RunningEngines

__all__ = ["EngineProgress", "RunningEngines"]
