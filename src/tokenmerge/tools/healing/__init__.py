"""`tokenmerge heal`: a LoRA that makes the merged model draw what the plain one draws."""
