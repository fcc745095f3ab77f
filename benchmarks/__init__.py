"""Scripts that measure; they never fail a test run."""
