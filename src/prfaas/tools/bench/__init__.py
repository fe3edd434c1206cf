"""A load test by vLLM's own tool, and what the gateway counted meanwhile."""
