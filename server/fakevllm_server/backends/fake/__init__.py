"""An engine without torch, for tests and demos. It answers "yes." or "no.", and can be trained.

engine.py              the engine, and the entry point of its process
byte_tokens.py         the token ids and their texts
script.py              directives in a user message that determine the answer
minimal_json_value.py  the minimal value that a JSON schema allows
"""
