"""This module keeps the documented import path of `TrainJob` working. The class is defined in
`fakevllm.sdk.job`."""

from fakevllm.sdk.job import TrainJob

__all__ = ["TrainJob"]
