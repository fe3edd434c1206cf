"""How fast an instance is: prefill seconds over lengths, decode step seconds over batches, and where that is known."""
