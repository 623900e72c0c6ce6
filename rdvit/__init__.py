"""Recurrent-depth vision transformers for medical image segmentation (2D and 3D), on MONAI and PyTorch."""

__version__ = "0.1.0"
