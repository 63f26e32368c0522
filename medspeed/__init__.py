"""Medical image segmentation and slide detection, from raw scans to checked engines; see the README."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("medspeed")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"
