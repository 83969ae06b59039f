"""A server that draws: requests as OpenAI has them, batches, and replicas under Ray Serve."""
