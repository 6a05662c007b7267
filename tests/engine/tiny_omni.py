"""The code that comes with the small model of images and audio (``build_models.omni``): it is copied into its folder.

MiniCPM-o's own checkpoints bring the same three: a configuration, an image processor and a processor.
"""

from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, WhisperConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from vllm.transformers_utils.processors.minicpmo import MiniCPMOProcessor

__all__ = ["MiniCPMOProcessor", "TinyOmniConfig", "TinyOmniImageProcessor"]

SIDE, PATCH, QUERIES = 56, 14, 4
"""Every image becomes a square of this side, in pixels, cut into patches, of which so many tokens are made."""


class TinyOmniConfig(Qwen3Config):  # type: ignore[misc]  # transformers is untyped here
    """A Qwen3 with the parts that see and hear."""

    model_type = "minicpmo"

    def __init__(self, vision_config: Any = None, audio_config: Any = None, **values: Any) -> None:
        self.vision_config = Idefics2VisionConfig(**(vision_config or {}))
        self.audio_config = WhisperConfig(**(audio_config or {}))
        self.version = "4.5"
        self.query_num = QUERIES
        self.image_size = SIDE
        self.max_slice_num = 1
        self.drop_vision_last_layer = False
        self.audio_pool_step = 2
        self.audio_chunk_length = 1.0
        super().__init__(**values)


class TinyOmniImageProcessor(BaseImageProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Each image as one slice of patches."""

    model_input_names = ("pixel_values",)
    version = 4.5
    max_slice_nums = 1
    image_feature_size = QUERIES

    def __call__(self, images: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Takes a list of images for each prompt."""
        sides = torch.tensor([[SIDE // PATCH] * 2])
        return {
            "pixel_values": [[patches(image) for image in of_one] for of_one in images],
            "image_sizes": [[image.size for image in of_one] for of_one in images],
            "tgt_sizes": [sides.repeat(len(of_one), 1) for of_one in images],
        }

    def get_sliced_grid(self, *_: Any, **__: Any) -> None:
        """None: an image is never cut into slices."""

    def get_slice_image_placeholder(self, *_: Any, **__: Any) -> str:
        """What stands in the prompt for an image."""
        return "<image>" + "<unk>" * QUERIES + "</image>"


def patches(image: Any) -> torch.Tensor:
    """An image as one row of its patches: three colours, the height of a patch, all patches side by side."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), np.float32) / 127.5 - 1
    grid = torch.from_numpy(pixels).permute(2, 0, 1).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return grid.permute(0, 3, 1, 2, 4).reshape(3, PATCH, -1)
