"""What people run: commands, drawing, benchmarks, evaluation, quality, tuning, and the paper's tables."""
