"""`tokenmerge demo`: a page on this machine that draws a picture plain and fast, side by side."""

import os

# Gradio reads this variable at import.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
