"""What a user sees of a table: the mixin, its jobs, and how to find tables."""
