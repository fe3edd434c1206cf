"""Pure decisions: a request and a view of the deployment in, a decision out. No clock, no I/O."""
