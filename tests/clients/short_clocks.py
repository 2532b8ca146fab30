"""`fakevllm` with clocks a tenth as long, to see what keeps a client waiting: as a program."""

from __future__ import annotations

from fakevllm import cli, reply

reply.KEEP_ALIVE_EVERY_S /= 10
reply.PATIENCE_S /= 50

if __name__ == "__main__":
    cli.main()
