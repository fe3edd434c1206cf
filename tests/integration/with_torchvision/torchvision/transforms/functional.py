"""What transformers imports of this module."""

pil_to_tensor = None
