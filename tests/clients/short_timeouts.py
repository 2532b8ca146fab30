"""The program `fakevllm` with shorter timeouts, so that tests of waiting clients are fast."""

from __future__ import annotations

from fakevllm.cli import main
from fakevllm.transport import app_response

app_response.KEEP_ALIVE_EVERY_S /= 10
app_response.WHITE_SPACE_AFTER_S /= 50

if __name__ == "__main__":
    main.main()
