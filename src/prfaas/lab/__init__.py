"""Offline answers: the simulator, studies, reports."""
