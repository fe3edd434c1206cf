"""The traffic: how long prompts and answers are, as formulas or from traces."""
