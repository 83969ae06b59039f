"""Compares techniques by time and quality, over many prompts and seeds."""
