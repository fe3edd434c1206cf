"""Results as tables and plots. Nothing is computed here, and nothing of ours but units is known."""
