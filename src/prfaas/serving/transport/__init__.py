"""Moving KV between machines over TCP: verified, paced, resumable. Knows bytes, regions and offsets, nothing
of vLLM or HTTP. The wire format is in docs/reference/wire-format.md."""
