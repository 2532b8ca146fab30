"""Routes of the swarm server, and the checks and refusals that they share.

inference.py         calls to the model
model_call_relay.py  one call to the model: translation, recording, forwarding to the engine
model_cards.py       one entry of the engine's list of models
stored_responses.py  retrieval and deletion of answers in the Responses format
episodes.py          episodes that clients claim
groups.py            groups of answers to apps' requests, and feedback samples
control.py           status, job, start and stop of the engine, run log
versions.py          versions of the weights: sampled, released, rejected, returned to
inspection.py        claimed episodes, the batch, tokens, verbose log
uploads.py           upload of training code
authorization.py     roles of API keys, and owners of episodes
refusals.py          error responses to invalid bodies and failed writes
"""
