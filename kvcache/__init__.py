"""TODO contract."""
