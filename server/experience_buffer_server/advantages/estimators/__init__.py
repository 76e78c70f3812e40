"""One file per family of estimators, and the register of their names."""
