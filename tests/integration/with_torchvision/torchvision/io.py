"""What transformers imports of this module."""

ImageReadMode = decode_image = None
