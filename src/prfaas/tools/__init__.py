"""Tools that drive a live deployment: demo, replay, profiling, doctor."""
