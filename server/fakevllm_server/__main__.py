"""Run the command `fakevllm-server` as `python -m fakevllm_server`."""

from fakevllm_server.cli.main import main

main()
