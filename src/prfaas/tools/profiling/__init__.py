"""Measures a running engine's prefill and decode times into a latency profile."""
