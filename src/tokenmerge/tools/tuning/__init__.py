"""`tokenmerge tune`: search the merging settings of a model for a budget of drift or a wished speed-up."""
