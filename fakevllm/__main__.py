"""`python -m fakevllm` is `fakevllm`."""

from fakevllm.cli import main

main()
