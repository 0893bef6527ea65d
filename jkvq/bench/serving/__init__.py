"""How fast a server of OpenAI's interface is, under load."""
