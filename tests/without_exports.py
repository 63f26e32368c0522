"""`python tests/without_exports.py PROGRAM FLAGS...`: a training program that ends without exports.

They take most of the time of a run of a few steps; this is for tests of what comes before them.
"""

import runpy
import sys
from pathlib import Path

from medspeed.common.export import export
from medspeed.common.training import evaluate

NONE = (export.Exported("onnx", "fp32", reason="left out"), export.Exported("engine", reason="left out"))


def main() -> None:
    """Run the program, whose imports find stand-ins for the functions that export."""
    export.export = lambda *_: NONE
    evaluate.export_best = lambda *_: NONE
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
