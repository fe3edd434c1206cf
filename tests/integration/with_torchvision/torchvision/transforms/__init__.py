"""What transformers imports of this module."""

from enum import Enum


class InterpolationMode(Enum):
    """As Pillow has them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "box"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
