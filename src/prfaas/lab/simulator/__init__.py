"""Discrete events around the live policies: what a deployment would do with a stream of requests."""
