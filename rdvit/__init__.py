"""Recurrent-depth vision transformers for medical image segmentation (2D and 3D), on MONAI and PyTorch."""

import os

__version__ = "0.1.0"

# Nothing is sent anywhere. Set before MONAI, which imports MLflow, whose telemetry starts at its import.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("DO_NOT_TRACK", "true")
