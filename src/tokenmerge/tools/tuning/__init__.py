"""`tokenmerge tune`: searches settings of Merge and Hold for a budget of drift or a target speed-up."""
