"""Engines behind the server. Heavy libraries live here and nowhere else, in processes of their
own."""
