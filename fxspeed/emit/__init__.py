"""What a person reads: graphs as Python, diffs, reports."""
