"""The Responses API of OpenAI."""
