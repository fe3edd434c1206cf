"""The live control plane: telemetry, KV events and health in, one `scheduling.View` out; thresholds and roles."""
