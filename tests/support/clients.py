"""OpenAI's clients, as tests use them by the hundred.

They read no certificates, which would take longer than all that they are asked, and try nothing again.
"""

import httpx
import openai


def client_of(base_url, api_key, timeout=None):
    http = httpx.Client(verify=False, timeout=timeout)
    given = {"timeout": timeout, "max_retries": 0, "http_client": http}
    return openai.OpenAI(base_url=base_url, api_key=api_key, **given)


def async_client_of(base_url, api_key):
    http = httpx.AsyncClient(verify=False, timeout=None)
    given = {"timeout": None, "max_retries": 0, "http_client": http}
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **given)
