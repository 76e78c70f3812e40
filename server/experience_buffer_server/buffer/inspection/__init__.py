"""Looking at a buffer's state: where everything is, what keeps it there. Changes nothing."""
