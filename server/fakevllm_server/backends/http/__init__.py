"""The HTTP server of an engine's process.

The server has two sets of routes. vLLM's public routes call a TokenEngine, which is the interface
for sampling. The control routes call a TrainEngine, which is the interface for training. Only the
swarm server uses the control routes. An engine may hold further policies: sets of weights that a
call selects by the model's name.

    engine_server.py        the process's HTTP server on a Unix socket
    vllm_routes.py          vLLM's public routes
    control_routes.py       `/control/…`: train, publish, save
    policies.py             further policies, and their names
    preparation.py          threads that parse, check and tokenize requests
    chat_completion.py      one /v1/chat/completions request
    text_completion.py      one /v1/completions request
    completion_choice.py    sampling of one choice: text, stop strings, finish reason
    multiple_choices.py     several choices of one request at once
    detokenizer.py          conversion of token ids to text, and stop strings
    tool_calls.py           tool calls in an answer's text
    sampling_parameters.py  a request's sampling parameters
    tokenization.py         /tokenize and /detokenize
    engine_wrapper.py       base class of engines that sample by way of another engine
    engine_metrics.py       Prometheus metrics with vLLM's names
"""
