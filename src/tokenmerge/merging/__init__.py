"""Merge: a step runs on fewer tokens. Grids, maps, methods, operations, and the sites where tokens merge."""
