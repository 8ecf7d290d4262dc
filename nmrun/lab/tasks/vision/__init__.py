"""Images: data sets, augmentation, classification."""

from nmrun.lab.tasks.vision.classification import Classification

__all__ = ["Classification"]
