"""Entry point of `python -m fakevllm`, which does the same as the command `fakevllm`."""

from fakevllm.cli.main import main

main()
