"""Plans: what a technique will do to a model, what that saves, and how people are told."""
