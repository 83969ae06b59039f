"""What people use in place of Merge and Hold: step caches from other packages, and other schedules."""
