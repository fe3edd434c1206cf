"""Requests as clients make them, and their prompts in tokens."""
