"""What transformers imports of this module."""
