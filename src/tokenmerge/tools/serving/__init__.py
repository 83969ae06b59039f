"""An HTTP server that draws: OpenAI's image API, batches, and replicas under Ray Serve."""
