"""Recipe guide on a GPU: the script's random transforms by cuCIM's CUDA kernels, a whole batch at a time.

Source: MONAI tutorials, pathology/tumor_detection/torch/camelyon_train_evaluate_pytorch_gpu.py, backend cucim. cuCIM
draws from generators of its own that nobody can seed, so that no two runs are alike.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from monai.transforms import CuCIM, RandCuCIM

from common.data.colour import ColourJitter


def why_not_cucim(device: torch.device) -> str | None:
    """Return why cuCIM's kernels cannot run, None where they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("cupy") is None:
        return "cupy is not installed (pip install -e '.[gpu]')"
    import cupy

    return None if cupy.is_available() else "cupy finds no GPU"


def batch_transforms(settings: ColourJitter, zoom: tuple[float, float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the script's transforms of a batch on a GPU.

    Args:
        settings: the largest changes of the colours.
        zoom: smallest and greatest zoom.

    Returns:
        From images [B, 3, Y, X] in [0, 255] on a GPU to float32 in [-1, 1].
    """
    jitter = {name: getattr(settings, name) for name in ("brightness", "contrast", "saturation", "hue")}
    geometry = [
        RandCuCIM(name="rand_image_flip", prob=0.5, spatial_axis=-1),
        RandCuCIM(name="rand_image_rotate_90", prob=0.5, max_k=3, spatial_axis=(-2, -1)),
    ]
    colour = RandCuCIM(name="rand_color_jitter", prob=1.0, **jitter)
    zooming = RandCuCIM(name="rand_zoom", prob=0.5, min_zoom=zoom[0], max_zoom=zoom[1])
    scaling = CuCIM(name="scale_intensity_range", a_min=0.0, a_max=255.0, b_min=-1.0, b_max=1.0)

    def transform(images: torch.Tensor) -> torch.Tensor:
        import cupy

        # Both libraries must use one stream: without it cuCIM would read what torch has not written yet.
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            array = colour(cupy.from_dlpack(images.detach().to(torch.uint8)))
            for each in geometry:
                array = each(array)
            array = scaling(zooming(array.astype(cupy.float32)))
            return torch.utils.dlpack.from_dlpack(cupy.ascontiguousarray(array, cupy.float32))

    return transform
