"""The ragged arrays that everything is computed over."""
