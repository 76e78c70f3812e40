"""The routes below `/api/v1`: the calls that look, as JSON of the client's values."""
