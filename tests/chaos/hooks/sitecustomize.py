"""Imported by every Python process of a server under test, by way of PYTHONPATH; see `dying`."""

import importlib
import os
import sys

if "CHAOS_PLAN" in os.environ:
    # Only here: neither the tests nor the product know of this folder.
    sys.path.insert(0, os.path.dirname(__file__))
    importlib.import_module("dying").prepare(sys.orig_argv)
