"""The queue of a schema and of a table: jobs are put in, claimed, ended, cancelled and cleaned up."""
