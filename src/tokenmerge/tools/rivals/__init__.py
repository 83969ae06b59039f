"""What people use in place of Merge and Hold: step caches of others and other schedules, each by its own package."""
