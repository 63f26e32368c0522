"""Estimate a training step on a GPU, without one: how long it would take, and the floor below it."""

from medspeed.apps import APPS
from medspeed.benchmarks.fake_cuda import shim
from medspeed.benchmarks.fake_cuda.gpus import GPUS
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=APPS)
PARSER.add_argument("--gpu", choices=GPUS, default="h200", help="GPU to estimate for")

if __name__ == "__main__":
    GIVEN = PARSER.parse_args()
    shim.load()  # before torch is loaded
    from medspeed.benchmarks.fake_cuda.estimate import main

    main(GIVEN.app, GIVEN.gpu)
