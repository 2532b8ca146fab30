"""This package keeps the documented import path `fakevllm.client.job` working. The code of the SDK
is in `fakevllm.sdk`."""
