"""What people run: commands, drawing, benchmarks, evaluation, quality, tuning, the paper's tables, and a server."""
