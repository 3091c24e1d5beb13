"""Events: inserts and deletes upstream schedule jobs and clean up."""
