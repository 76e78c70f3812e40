"""How rows, files and pages lie on the disk, and what opens them."""
