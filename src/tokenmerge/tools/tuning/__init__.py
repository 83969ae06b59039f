"""`tokenmerge tune`: search settings of Merge and Hold for a budget of drift or a wished speed-up."""
