"""Advantages of whole groups: what is due, the process that computes, and its results."""
