"""Networks: plain functions that return an nn.Module.

Those of volumes take the channels of image and logits, `in_channels` and `out_channels`, and further arguments with
defaults. `--network` finds them by name: one more is a function in a file here, and no other edit.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def networks() -> dict[str, str]:
    """Return the names of the functions here that return a network of volumes, with their modules; loads none."""
    files = ((path.stem, path.read_text("utf-8")) for path in sorted(Path(__file__).parent.glob("*.py")))
    found = ((re.findall(r"^def ([a-z]\w*)\(\s*in_channels", text, re.M), stem) for stem, text in files)
    return {name: f"{__name__}.{stem}" for names, stem in found for name in names}


def check_name(name: str | None) -> tuple[str, bool, str]:
    """Return a configuration's check of `--network`: one of `networks` (3d may be left out), or MODULE:FUNCTION."""
    there = networks()
    holds = name is None or {name, f"{name}3d"} & {*there} or re.fullmatch(r"\w+(\.\w+)*:\w+", name)
    return "network.name", bool(holds), f"one of {', '.join(there)}, or your.module:function"


def find_network(name: str) -> Callable[..., Any]:
    """Return the function of a network by a name that `check_name` knows; ValueError where there is none.

    A user's own is imported from what is installed or from the current folder: its code runs.
    """
    there, (_, holds, choices) = networks(), check_name(name)
    if not holds:
        raise ValueError(f"network {name}: must be {choices}")
    short = name if name in there else f"{name}3d"
    if short in there:
        return getattr(importlib.import_module(there[short]), short)  # type: ignore[no-any-return]
    (module, _, function), here = name.partition(":"), str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        own: Any = functools.partial(getattr(importlib.import_module(module), function))
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ValueError(f"network {name}: cannot be imported, installed or from {here}: {error}") from error
    own.__name__ = name  # as model.json keeps it
    return own  # type: ignore[no-any-return]
