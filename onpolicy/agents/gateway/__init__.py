"""Episodes over HTTP, for agents that speak the protocols of OpenAI or Anthropic, unmodified."""
