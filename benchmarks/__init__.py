"""Benchmarks: run them with `make bench`; nothing here is part of the package."""
