"""The documented import path of `TrainJob`. The class is defined in `fakevllm.sdk.job`."""

from fakevllm.sdk.job import TrainJob

__all__ = ["TrainJob"]
