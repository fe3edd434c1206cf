"""What drives a live deployment: demo, replay, profiling, doctor."""
