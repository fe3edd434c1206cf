"""The live path: bytes between machines, engines, the gateway in front, the control plane behind."""
