"""`python -m fakevllm_server` is `fakevllm-server`."""

from fakevllm_server.cli.main import main

main()
