"""The weights that come with the package: trained on phantoms alone, for a first try of inference and export."""

from importlib.resources import files
from pathlib import Path

from medspeed.common.files import atomic_path


def model_folder(model: Path) -> Path:
    """Return the folder of a run; for "demo", unless there is such a folder, a copy of the demo weights.

    The copy is ~/.cache/medspeed/demo, so that exports and engines can be written beside the weights.
    """
    folder = model.expanduser()
    if model == Path("demo") and not model.exists():
        folder = Path("~/.cache/medspeed/demo").expanduser()
        for shipped in (files("medspeed") / "demo").iterdir():
            content, copy = shipped.read_bytes(), folder / shipped.name
            if not copy.is_file() or copy.read_bytes() != content:
                with atomic_path(copy) as part:
                    part.write_bytes(content)
    return folder
