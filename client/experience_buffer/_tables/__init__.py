"""Experiences as rows of a table, and tables as files: what `experience_buffer.tables` offers."""
