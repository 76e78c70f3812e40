"""What is wrong with a store at rest."""
