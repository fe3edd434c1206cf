"""The demo's second part, when it pays: one burst to a deployment with PrfaaS and to as many machines without it.

Engines are stand-ins; gateway, scheduler and KV transport are the real ones. The simulator gets the same burst.
"""

from prfaas.tools.demo.pays.burst import BURST_REQUESTS, Burst, Side
from prfaas.tools.demo.pays.outcome import BurstOutcome
from prfaas.tools.demo.pays.run import run_burst

__all__ = ["BURST_REQUESTS", "Burst", "BurstOutcome", "Side", "run_burst"]
