"""Pictures of a run folder, small enough to travel inside its report."""

import base64
import io
from pathlib import Path

from PIL import Image

from common.observe.figures import one_line
from common.observe.report_page import Html, element

_WIDEST, _TALLEST = 1600, 2400  # pixels
_AS_IT_IS = 600_000  # bytes of a PNG that is embedded unchanged
_ALL = 3 * 2**20  # bytes of all pictures: with the largest case a report then stays below 8 MB
_QUALITY = 85  # of JPEG, where a picture had to be made smaller


class Pictures:
    """The pictures of one report: those that came first are in it, the others are named."""

    def __init__(self) -> None:
        self._free = _ALL
        self.left_out: list[str] = []

    def embed(self, path: Path, **attributes: object) -> Html | None:
        """Return an `img` that holds the picture; None, and a line in `left_out`, where it has no room or is damaged.

        Args:
            path: a PNG.
            attributes: of the element, see `element`.
        """
        try:
            kind, content, size = _small(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            self.left_out.append(f"{path.name} cannot be read: {one_line(str(error), 120)}")
            return None
        if len(content) > self._free:
            self.left_out.append(f"{path.name} is not in this page: its pictures would exceed {_ALL >> 20} MiB")
            return None
        self._free -= len(content)
        source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        return element("img", src=source, alt=path.stem, width=size[0], height=size[1], **attributes)


def _small(path: Path) -> tuple[str, bytes, tuple[int, int]]:
    """Return the format, the bytes and the size of a picture that is at most so large as a report can hold."""
    content = path.read_bytes()
    with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        picture.load()
        if picture.width <= _WIDEST and picture.height <= _TALLEST and len(content) <= _AS_IT_IS:
            return "png", content, picture.size
        small = picture.convert("RGB")
    small.thumbnail((_WIDEST, _TALLEST), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=_QUALITY)
    return "jpeg", stream.getvalue(), small.size
