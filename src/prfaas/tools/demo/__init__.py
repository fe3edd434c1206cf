"""The main job shown and checked: prompts through two clusters, then the same ones through one plain engine."""

from prfaas.tools.demo.gateway import DemoError
from prfaas.tools.demo.outcome import DemoOutcome, outcome_of
from prfaas.tools.demo.prompts import DemoPrompt, demo_prompts
from prfaas.tools.demo.run import Stages, run_demo

__all__ = ["DemoError", "DemoOutcome", "DemoPrompt", "Stages", "demo_prompts", "outcome_of", "run_demo"]
