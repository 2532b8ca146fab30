"""`fakevllm import`: make the rows of a dataset from a log of requests to OpenAI's or Anthropic's
API. The rows are for `fakevllm replay` and `fakevllm eval`.

command.py      the command
log_formats.py  find the request and its answer in a line of a log

The command calls no model. It copies the messages of the requests, and drops sampling parameters.
"""
