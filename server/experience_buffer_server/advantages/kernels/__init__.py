"""Loops over packed tokens, compiled for the CPU or as operations on a device."""
