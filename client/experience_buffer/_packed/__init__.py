"""Batches as columns: layout, rows, and views of them."""
