"""Accept an answer if its last number equals the field `answer` of the row: exit with 0, else 1.

The hook writes one JSON object to the standard input, with `question`, `answer` and `metadata`.
"""

import json
import re
import sys

request = json.load(sys.stdin)
numbers = re.findall(r"-?\d+", request["answer"])
is_right = bool(numbers) and numbers[-1] == str(request["metadata"].get("answer"))
sys.exit(0 if is_right else 1)
