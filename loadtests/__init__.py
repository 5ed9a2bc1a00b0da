"""Load tests: Locust users that speak OpenAI's API."""
