"""Tools: what a request offers, the grammar that forces a call, and the parsers of what models write."""
