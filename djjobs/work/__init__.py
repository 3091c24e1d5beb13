"""Work: claim jobs and run them, in this process or in child processes, and keep them alive."""
