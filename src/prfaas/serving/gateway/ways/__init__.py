"""The ways in which a prompt's KVCache gets to its decode engine."""
