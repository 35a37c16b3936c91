"""Networks that are graphs of populations."""
