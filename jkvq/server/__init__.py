"""An engine behind OpenAI's interface over HTTP."""
