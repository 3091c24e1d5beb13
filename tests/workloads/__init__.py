"""What the workers of the tests run: here, in forked processes and in interpreters of their own."""
