"""Networks of other libraries inside ours, and ours inside theirs."""
