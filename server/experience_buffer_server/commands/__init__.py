"""The commands beside `serve`, a module each."""
