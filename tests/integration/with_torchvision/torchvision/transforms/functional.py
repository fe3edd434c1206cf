"""What transformers and vLLM use of this module."""

import numpy as np
import torch
from PIL import Image

to_pil_image = None


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    """uint8 of shape (channels, height, width)."""
    pixels = torch.from_numpy(np.array(image, copy=True))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
