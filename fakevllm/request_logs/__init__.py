"""`fakevllm import`: logged requests in OpenAI's formats as rows of a dataset. The rows are for
`fakevllm replay` and `fakevllm eval`.

command.py      the command
log_formats.py  find the request and its answer in a line of a log

The command asks no model. It keeps the requests' messages, and drops sampling parameters.
"""
