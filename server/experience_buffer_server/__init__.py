"""The experience buffer server."""

from importlib.metadata import version

__version__ = version("experience-buffer")
