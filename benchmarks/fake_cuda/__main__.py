"""Count what a step costs on a GPU, without one, and compare it with the budget."""

from medspeed.apps import APPS
from medspeed.benchmarks.fake_cuda import shim
from medspeed.common.flags import Parser

PARSER = Parser(prog="python -m medspeed.benchmarks.fake_cuda", description=__doc__)
PARSER.add_argument("apps", nargs="*", choices=[*APPS, []], help="all by default")
PARSER.add_argument("--write", action="store_true", help="make what is counted now the budget")

if __name__ == "__main__":
    GIVEN = PARSER.parse_args()
    shim.load()  # before torch is loaded
    from medspeed.benchmarks.fake_cuda.budget import main

    main(GIVEN.apps or APPS, GIVEN.write)
