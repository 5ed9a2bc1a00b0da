"""Measurements over HTTP, beside other servers in the same run. Never a test: figures are for reading."""
