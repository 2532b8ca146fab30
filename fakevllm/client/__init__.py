"""The documented import path `fakevllm.client.job`. The code of the SDK is in `fakevllm.sdk`."""
