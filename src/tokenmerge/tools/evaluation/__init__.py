"""Compare configurations of merging by time and quality, on many prompts and seeds."""
