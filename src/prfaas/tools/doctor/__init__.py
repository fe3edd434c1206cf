"""Checks a deployment: its files, its engines, its gateway."""
