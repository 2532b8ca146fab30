"""Entry point of `python -m fakevllm`, which equals the command `fakevllm`."""

from fakevllm.cli.main import main

main()
