"""Transfers in a simulated world: any number of schedules of faults, each from one seed, in one thread.

The state machines are those of the product (`serving/transport/protocol`); network, clock and engines are simulated.
"""
