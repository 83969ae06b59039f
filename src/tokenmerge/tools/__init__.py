"""What people run: commands, drawing, a page, a server, benchmarks, evaluation, tuning, healing, the paper's tables."""
