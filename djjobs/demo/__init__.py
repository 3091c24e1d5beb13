"""The demo: a small pipeline on an embedded PostgreSQL."""
