"""Count what the apps' steps cost on a GPU, without one: `python -m benchmarks.fake_cuda [APP ...] [--write]`."""

from benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()  # before torch is loaded
    from benchmarks.fake_cuda.budget import main

    main()
