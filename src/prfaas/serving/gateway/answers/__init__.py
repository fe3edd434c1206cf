"""Answers, from the decode engine to the client."""
