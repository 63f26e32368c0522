"""Programs that download, convert and draw data. They start at once: none loads torch or MONAI."""

import sys
from collections.abc import Callable


def run_program(name: str, work: Callable[[], int | None], status: int = 2) -> int:
    """Do a program's work; return its exit status: `status` after one line on what to change, 130 if interrupted."""
    try:
        return work() or 0
    except (ValueError, OSError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again", file=sys.stderr)
        return 130
