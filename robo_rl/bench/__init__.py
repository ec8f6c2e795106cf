"""Measurements: ours, the limit, and what else a user could take, the same work on each side."""
