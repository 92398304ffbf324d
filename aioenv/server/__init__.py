"""The HTTP side: routes of the protocol over a pool."""
