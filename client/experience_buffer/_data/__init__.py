"""What trainers are fed: trajectories, budgets of tokens, collation for frameworks."""
