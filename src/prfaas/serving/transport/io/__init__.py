"""Threads, sockets, TLS and shared memory around the protocol's state machines."""
