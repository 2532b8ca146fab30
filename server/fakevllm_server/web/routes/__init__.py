"""Routes of the swarm server, and the checks and refusals that they share.

inference.py    calls to the model
model_call_relay.py  one call to the model: translation, capture, forwarding to the engine
episodes.py     episodes of active clients
groups.py       groups of passive traffic, and feedback samples
control.py      status, job, start and stop of the engine, run log
inspection.py   claimed episodes, the batch, tokens, verbose log
uploads.py      upload of training code
authorization.py       roles, and owners of episodes
refusals.py     error responses to invalid bodies and failed writes
"""
