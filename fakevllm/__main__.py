"""`python -m fakevllm` is `fakevllm`."""

from fakevllm.cli.main import main

main()
