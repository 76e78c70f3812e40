"""Copies of a store that is in use, and stores made of them."""
