"""`fakevllm-server` that reports the states of an agreed step for a tenth of the usual time.

Stock clients that look at the status ten times as often then see each state as often as usual.
"""

from __future__ import annotations

from fakevllm_server.cli import main
from fakevllm_server.episodes import agreement_status

SPEED = 10.0

if __name__ == "__main__":
    agreement_status.HOLD_S /= SPEED
    main.main()
