"""A swarm server at work, on one screen: snapshot, picture, keys."""
