"""What transformers uses of this module to make pixels of images."""

from collections.abc import Sequence

import torch

from torchvision.transforms import InterpolationMode as InterpolationMode
from torchvision.transforms.functional import pil_to_tensor as pil_to_tensor


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """`image` of shape (..., channels, height, width) with another height and width."""
    batch = image.reshape(-1, *image.shape[-3:]).float()
    resized = torch.nn.functional.interpolate(
        batch, size=tuple(size), mode=interpolation.value, antialias=antialias
    )
    if image.dtype == torch.uint8:
        resized = resized.round().clamp(0, 255)
    return resized.to(image.dtype).reshape(*image.shape[:-2], *size)


def normalize(
    image: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> torch.Tensor:
    """`image` less `mean`, over `std`, channel by channel."""
    means, stds = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return (image - means) / stds
