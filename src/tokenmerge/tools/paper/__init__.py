"""The tables and figures of the paper (arXiv 2509.10918), each as a command."""
