"""Stand-in engines for load, scale and fault tests: vLLM's HTTP, KV events and our transport without a model.

KV bytes are a function of the tokens, the answer's tokens are a function of the KV bytes: what is lost, damaged or
misplaced on the way shows in the answer. Times come from a latency profile. Answers mean nothing.
"""

VERSION = "prfaas-synthetic"
"""What a stand-in calls itself wherever an engine says what it is."""
