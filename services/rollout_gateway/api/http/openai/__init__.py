"""Chat completions and completions of OpenAI."""
