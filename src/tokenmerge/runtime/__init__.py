"""What both techniques stand on: where the denoising loop is, the kind of every step, and what is put on a model."""
