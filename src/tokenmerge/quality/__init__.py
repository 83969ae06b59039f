"""How far pictures are apart, how good sets of them are, and where the networks that judge come from."""

from .pixels import compare, mse, psnr, ssim

__all__ = ["compare", "mse", "psnr", "ssim"]
