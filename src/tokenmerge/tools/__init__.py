"""What people run: commands, drawing, the demo page, the server, benchmarks, evaluation, tuning, healing, the paper."""
