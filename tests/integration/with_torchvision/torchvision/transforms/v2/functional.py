"""What transformers imports of this module."""

from torchvision.transforms import InterpolationMode as InterpolationMode
