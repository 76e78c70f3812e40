"""What comes in: a push from its bytes to the commit, and what is annotated later."""
