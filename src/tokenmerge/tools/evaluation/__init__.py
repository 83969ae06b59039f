"""Compare techniques by time and quality, on many prompts and seeds."""
