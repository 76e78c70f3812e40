"""What comes before and after an estimator: votes, shaping, statistics, normalising."""
