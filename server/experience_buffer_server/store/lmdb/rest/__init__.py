"""Reading the experiences of a store at rest, whatever of it is damaged. Nothing is written."""
